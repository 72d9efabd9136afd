"""Losses for a loop of one's own against the same losses written out, document by document, in float64."""

import copy
import gc
import os
import sys
import weakref
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.batches import batch, documents_of
from support.launched import run_ranks
from support.tiny import tiny, tokens
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rope_patch import patch_model, rope_view
from rope_patch.base.draws import DrawKey
from rope_patch.layout.documents import document_numbers, locate_documents
from rope_patch.losses import (
    RelationTargets,
    SharedTeacher,
    ViewConsistency,
    in_loops,
    relation_loss,
    relation_loss_ref,
    self_distillation_counts,
    self_distillation_loss,
    self_distillation_loss_ref,
    view_states,
)
from rope_patch.patch import view_source
from rope_patch.views import Linear, Skip, Uniform

KINDS = ["plain", "right", "left", "packed", "completion"]
VIEW, STEP, SEED = Skip(skip=Uniform(1, 40)), 3, 7
DRAWN = {"view": VIEW, "step": STEP, "seed": SEED}


def alone(data):
    """Token IDs and labels of each document."""
    for row, start, length in documents_of(data):
        yield tuple(data[name][row, start : start + length] for name in ("input_ids", "labels"))


def index_of(ids, step=STEP):
    """RoPE indices that VIEW draws for a document by its seed, step and tokens."""
    documents, t = locate_documents(1, len(ids), ids.device, None, None), torch.arange(len(ids))[None]
    key = DrawKey(SEED, step, document_numbers(ids[None], t, documents))
    return VIEW.rope_index(t, VIEW.draw(documents.length, key))[0]


def inputs_of(data):
    return {name: x for name, x in data.items() if name != "labels"}


def parts_of(data):
    """A batch as one micro-batch a row."""
    return [{name: x[row : row + 1] for name, x in data.items()} for row in range(len(data["input_ids"]))]


def gradients(model):
    """Those of a model, 0 where a parameter has none, which are then cleared."""
    taken = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    model.zero_grad()
    return taken


def require_alike(model, loss, expected):
    """The same loss, and the same gradient of every parameter."""
    loss.backward()
    actual = gradients(model)
    expected.backward()
    torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-6, atol=1e-8)
    for a, b in zip(actual, gradients(model), strict=True):
        # float32 norms inside a float64 model
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * b.abs().max().item() + 1e-9)


def checkpointed(model, kwargs):
    if kwargs is not None:
        model.gradient_checkpointing_enable(kwargs)
    return model


CHECKPOINTING = {"whole": None, "checkpointed": {"use_reentrant": False}}


@pytest.mark.parametrize("checkpointing", [*CHECKPOINTING.values(), {"use_reentrant": True}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("passes", ["one", "two"])
def test_self_distillation_is_that_of_two_plain_passes(passes, kind, checkpointing):
    torch.manual_seed(3)
    data, model = batch(kind), tiny(dtype=torch.float64).train()
    documents = [(ids, labels, index_of(ids)) for ids, labels in alone(data)]
    expected = self_distillation_loss_ref(model, documents, kl_weight=0.7)
    if passes == "two":
        model.model.layers[0].mlp.dropout = 1e-9  # a rate that the module does not use: noise needs two passes
    model.enable_input_require_grads()
    checkpointed(model, checkpointing)
    loss = self_distillation_loss(model, data, **DRAWN, consistency=ViewConsistency(kl_weight=0.7))
    require_alike(model, loss, expected)


@pytest.mark.parametrize("checkpointing", CHECKPOINTING.values(), ids=CHECKPOINTING)
@pytest.mark.parametrize("kind", KINDS)
def test_relations_are_those_of_dense_maps(kind, checkpointing):
    torch.manual_seed(3)
    data, model, teacher = batch(kind), tiny(dtype=torch.float64).train(), tiny(dtype=torch.float64)
    patch_model(model, "yarn", factor=4.0)
    expected = relation_loss_ref(model, teacher, [ids for ids, _ in alone(data)])
    checkpointed(model, checkpointing)
    loss = relation_loss(model, teacher, inputs_of(data))
    assert loss > 0.01
    require_alike(model, loss, expected)


def test_the_parts_of_a_step_add_up_to_its_loss():
    """Whether they come one after the other or on several ranks."""
    torch.manual_seed(3)
    data, model, teacher = batch("right"), tiny(dtype=torch.float64).train(), tiny(dtype=torch.float64)
    counts = sum(self_distillation_counts(model, part, **DRAWN) for part in parts_of(data))
    assert counts.tolist() == [16 + 10 + 5, 3]
    losses = [self_distillation_loss(model, part, **DRAWN, counts=counts) for part in parts_of(data)]
    documents = [(ids, labels, index_of(ids)) for ids, labels in alone(data)]
    require_alike(model, sum(losses), self_distillation_loss_ref(model, documents))
    patch_model(model, "yarn", factor=4.0)
    losses = [relation_loss(model, teacher, part, n_tokens=17 + 11 + 6) for part in parts_of(data)]
    require_alike(model, sum(losses), relation_loss_ref(model, teacher, [ids for ids, _ in alone(data)]))


@pytest.mark.parametrize("reduction", ["token", "uniform"])
def test_other_means_add_up_too(reduction):
    torch.manual_seed(3)
    data, model = batch("packed"), tiny(dtype=torch.float64).train()
    options = {**DRAWN, "consistency": ViewConsistency(reduction=reduction)}
    alike = [{"input_ids": ids[None], "labels": labels[None]} for ids, labels in alone(data)]
    counts = sum(self_distillation_counts(model, part, **options) for part in alike)
    assert torch.equal(counts, self_distillation_counts(model, data, **options))
    moved = [int((index_of(ids) - index_of(ids)[0] != torch.arange(len(ids))).sum()) for ids, _ in alone(data)]
    assert counts[1] == (sum(moved) if reduction == "token" else 7 + 12 + 5)
    parts = sum(self_distillation_loss(model, part, **options, counts=counts) for part in alike)
    torch.testing.assert_close(parts, self_distillation_loss(model, data, **options), rtol=1e-6, atol=1e-8)


def test_a_rescaling_stays_and_a_view_of_the_model_makes_way():
    torch.manual_seed(3)
    data, model = batch("plain"), patch_model(tiny(dtype=torch.float64), "ntk", factor=4.0).train()
    expected = self_distillation_loss(model, data, **DRAWN)
    patch_model(model, "skip", split=2, skip=30)
    assert torch.equal(self_distillation_loss(model, data, **DRAWN), expected)
    assert view_source(model).last is None
    bare = tiny(dtype=torch.float64).train()
    assert (self_distillation_loss(bare, data, **DRAWN) - expected).abs() > 1e-3
    assert not hasattr(bare.model, "_rope_patch") and not bare.model._forward_pre_hooks


def test_a_curriculum_goes_by_the_progress_that_it_is_given():
    torch.manual_seed(3)
    data, model = batch("plain"), tiny(dtype=torch.float64).train()
    drawn = {"view": Skip(split=4, skip=Linear(Uniform(50, 60), [1, 2])), "step": STEP}
    first, last = (self_distillation_loss(model, data, **drawn, progress=progress) for progress in (0.0, 1.0))
    assert first < last - 0.01


@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize("loss", ["self-distillation", "relations", "states"])
def test_nothing_is_kept_of_a_loss_that_is_gone(loss, backward, monkeypatch):
    """With checkpointing, whose graph holds the request of the forward."""
    requests, call_with = [], in_loops.call_with

    def watched(model, inputs, request):
        requests.append(weakref.ref(request))
        return call_with(model, inputs, request)

    monkeypatch.setattr(in_loops, "call_with", watched)
    data, model = (
        batch("plain"),
        checkpointed(patch_model(tiny(), "yarn", factor=4.0).train(), {"use_reentrant": False}),
    )
    if loss == "self-distillation":
        result = self_distillation_loss(model, data, **DRAWN)
    elif loss == "relations":
        result = relation_loss(model, tiny(), inputs_of(data))
    else:
        result = view_states(model, data, VIEW, step=STEP)[0].sum()
    if backward:
        result.backward()
    del result
    gc.collect()
    assert [request() for request in requests] == [None]


def test_a_backward_that_raises_leaves_attention_as_it_was():
    before, model = dict(ALL_ATTENTION_FUNCTIONS._local_mapping), checkpointed(tiny().train(), {"use_reentrant": False})
    loss = self_distillation_loss(model, batch("plain"), **DRAWN)
    assert before == ALL_ATTENTION_FUNCTIONS._local_mapping
    handle = model.model.layers[1].mlp.down_proj.weight.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    assert before == ALL_ATTENTION_FUNCTIONS._local_mapping
    handle.remove()
    self_distillation_loss(model, batch("plain"), **DRAWN).backward()
    assert before == ALL_ATTENTION_FUNCTIONS._local_mapping


def test_weights_without_adapters_teach_like_a_copy_of_them():
    torch.manual_seed(3)
    data, base = batch("right"), tiny()
    teacher = copy.deepcopy(base)
    model = get_peft_model(base, LoraConfig(target_modules=["q_proj", "v_proj"], r=2, init_lora_weights=False))
    patch_model(model, "yarn", factor=4.0).train()
    losses = [relation_loss(model, t, inputs_of(data)) for t in (SharedTeacher(model), teacher)]
    torch.testing.assert_close(*losses)


def test_none_is_the_view_in_force_with_its_own_draw_and_a_recipe_names_a_view():
    model, data = patch_model(tiny().train(), Skip(split=3, skip=40)), {"input_ids": tokens(2, 12)}
    views = (None, {"view": "skip", "split": 3, "skip": 40}, "standard")
    in_force, named, standard = view_states(model, data, *views, step=STEP)
    torch.testing.assert_close(in_force, named)
    assert (in_force - standard)[:, 3:].abs().max() > 0.1
    in_evaluation, standard = view_states(model.eval(), data, None, "standard", step=STEP)
    torch.testing.assert_close(in_evaluation, standard)


def test_states_are_those_of_each_view_with_one_draw_for_a_document_in_any_batch():
    torch.manual_seed(3)
    data, model = batch("packed"), checkpointed(tiny(dtype=torch.float64).train(), {"use_reentrant": False})
    found = view_states(model, data, "standard", VIEW, step=STEP, seed=SEED)
    for state, in_evaluation in zip(
        found, view_states(model.eval(), data, "standard", VIEW, step=STEP, seed=SEED), strict=True
    ):
        torch.testing.assert_close(state, in_evaluation)
    model.train()
    (found[0] * found[1]).sum().backward()
    actual, expected = gradients(model), 0
    for (ids, _), (_, start, length) in zip(alone(data), documents_of(data), strict=True):
        states = []
        for index in (torch.arange(length), index_of(ids)):
            with rope_view(model, index=index[None]):
                states.append(model.model(ids[None], use_cache=False).last_hidden_state)
        for state, whole in zip(states, found, strict=True):
            # RoPE itself is float32
            torch.testing.assert_close(whole[:, start : start + length], state, atol=1e-4, rtol=0)
        expected = expected + (states[0] * states[1]).sum()
    expected.backward()
    for a, b in zip(actual, gradients(model), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4 * b.abs().max().item() + 1e-9)


def test_a_plain_loop_trains():
    torch.manual_seed(3)
    model, view, losses = tiny().train(), Skip(skip=Uniform(1, 40)), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = [{"input_ids": tokens(2, 19)}, {"input_ids": tokens(1, 30)}]  # the micro-batches of each step
    for step in range(5):
        drawn = {"view": view, "step": step}
        counts = sum(self_distillation_counts(model, part, **drawn) for part in batches)
        losses.append(0.0)
        for part in batches:
            loss = self_distillation_loss(model, part, **drawn, counts=counts)
            loss.backward()
            losses[-1] += loss.item()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0] - 1


RANKS = """
import torch.distributed as dist
from test_in_loops import *
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(3)
parts = [{"input_ids": tokens(2, 19)}, {"input_ids": tokens(1, 30)}]
mine, teacher = parts[dist.get_rank()], tiny(dtype=torch.float64)


def model(checkpointing):
    return checkpointed(patch_model(tiny(dtype=torch.float64), "yarn", factor=4.0).train(), checkpointing)


def apart(model, part):
    standard, moved = view_states(model, part, "standard", VIEW, step=STEP)
    return (1 - torch.cosine_similarity(standard, moved, dim=-1)).sum() / (2 * 19 + 30)


for checkpointing in CHECKPOINTING.values():
    alone, shared = model(None), DistributedDataParallel(model(checkpointing))
    counts = self_distillation_counts(shared, mine, **DRAWN)
    dist.all_reduce(counts)
    for loss in (
        lambda model, part: self_distillation_loss(model, part, **DRAWN, counts=counts),
        lambda model, part: relation_loss(model, teacher, part, n_tokens=2 * 19 + 30),
        apart,
    ):
        sum(loss(alone, part) for part in parts).backward()
        (loss(shared, mine) * dist.get_world_size()).backward()
        for a, b in zip(gradients(shared), gradients(alone), strict=True):
            torch.testing.assert_close(a, b)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_two_ranks_have_the_gradients_of_one_process(tmp_path):
    script, here = tmp_path / "script.py", Path(__file__)
    script.write_text(RANKS)
    root = here.parents[3]
    paths = os.pathsep.join(map(str, (root, root / "kernels", root / "tests", here.parent)))
    environment = {**os.environ, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    launch = ["-m", "torch.distributed.run", "--nproc_per_node", "2", str(script)]
    done = run_ranks([sys.executable, *launch], env=environment)
    assert done.returncode == 0, done.stderr[-3000:]


def three_layers():
    return tiny().train()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda data: self_distillation_loss(tiny(), data, **DRAWN),
            "needs a model in training mode: call model.train()",
        ),
        (
            lambda data: self_distillation_loss(three_layers(), data, view="standard", step=0),
            "give view='skip' or another that perturbs",
        ),
        (lambda data: relation_loss(three_layers(), three_layers(), data), "call teacher.eval()"),
        (
            lambda data: relation_loss(three_layers(), tiny(num_hidden_layers=2), data),
            r"same number of layers and the same attention implementation, got \(3, 'sdpa'\) and \(2, 'sdpa'\)",
        ),
        (
            lambda data: relation_loss(three_layers(), tiny(attention="eager"), data),
            r"got \(3, 'sdpa'\) and \(3, 'eager'\)",
        ),
        (
            lambda data: relation_loss(three_layers(), tiny(), data, targets=RelationTargets(layers=(3,))),
            "layers must be below 3",
        ),
    ],
    ids=["evaluation", "standard", "training", "layers", "attention", "target"],
)
def test_what_would_give_another_loss_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(inputs_of(batch("plain")))
