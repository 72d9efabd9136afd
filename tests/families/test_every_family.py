"""Every causal-LM family of Transformers that has RoPE: what we do with it is right, or refused with the reason.

No list says which families pass. A test fails on wrong numbers, on a patch without effect, on errors that are not ours,
and on refusals that `describe` does not tell. docs/composition.md shows the outcomes.
"""

import re
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from support.families import families, tiny_family
from support.tiny import WINDOW, tokens
from torch.nn import functional as F  # noqa: N812

from rope_patch import describe, native_rope, patch_model, rope_view, unpatch_model
from rope_patch.base.family_table import FAMILIES
from rope_patch.families.attention_calls import sliding_window, watched_attention
from rope_patch.families.capabilities import why_not_relative
from rope_patch.forward.cache_arguments import cache_argument, returned_cache
from rope_patch.layout.labelled import Labelled
from rope_patch.losses import (
    REQUEST,
    CopiedTeacher,
    RelationDistiller,
    RelationTargets,
    SelfDistiller,
    ViewConsistency,
    ViewRequest,
)
from rope_patch.patch import view_source
from rope_patch.rope.rotary import find_causal_lm, find_decoder
from rope_patch.views import Skip, View

N, SPLIT, SKIP = 20, 8, 30
VIEW = Skip(split=SPLIT, skip=SKIP)
RESCALINGS = {
    "pi": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": WINDOW},
    "abf": {"theta": 3e6},
}
every_family = pytest.mark.parametrize("family", families())


def half_of_families(parity):
    """Every second family and all that the table of families names; the others in slow tests."""
    return pytest.mark.parametrize(
        "family",
        [
            family if i % 2 == parity or family in FAMILIES else pytest.param(family, marks=pytest.mark.slow)
            for i, family in enumerate(families())
        ],
    )


@contextmanager
def refusals(record_property):
    """A ValueError that rope_patch itself raises in the block is recorded as a refusal; nothing else is caught."""
    reasons = []
    try:
        yield reasons
    except ValueError as error:
        frame = error.__traceback__
        while frame.tb_next is not None:
            frame = frame.tb_next
        if not frame.tb_frame.f_globals["__name__"].startswith("rope_patch"):
            raise
        record_property("refused", str(error))
        reasons += [str(error), frame.tb_frame.f_code.co_name]


@contextmanager
def described(model, what, record_property):
    """The block is refused if and only if `describe` says so, in the same words."""
    limit = describe(model).missing_capabilities.get(what)
    with refusals(record_property) as reasons:
        yield
    by_request = reasons[1:] == [
        "visit"
    ]  # what a first forward alone shows: keys of several tokens, layers that run twice
    assert by_request or reasons[:1] == ([] if limit is None else [limit])


@pytest.fixture
def model(family, record_property):
    """The tiny model of a family; the test is over for one that cannot be patched at all."""
    built = tiny_family(family)
    with refusals(record_property) as reasons:
        describe(built)
    if reasons:
        for change in (lambda: patch_model(built, VIEW), lambda: patch_model(built, "pi", factor=2.0)):
            with pytest.raises(ValueError, match=re.escape(reasons[0])):
                change()
        return None
    return built


def takes_views(model, record_property):
    """Whether a view has layers to act on; the refusal is recorded otherwise, which `test_view` looks at."""
    if model is not None and "views" in describe(model).missing_capabilities:
        record_property("refused", describe(model).missing_capabilities["views"])
        return False
    return model is not None


def logits(model, ids):
    return model(ids, use_cache=False).logits


def same(actual, expected, what):
    error, scale = (actual - expected).abs().max().item(), expected.std().item()
    assert error <= 1e-4 * scale, f"{what}: off by {error / scale:.1e} standard deviations"


@every_family
def test_the_window_of_a_layer_is_what_its_mask_shows(model):
    """Where attention is done without Transformers' masks, windows are what is known of them."""
    known, n = {"full_attention", "sliding_attention"}, 2 * N
    if model is None or not known.issuperset(getattr(find_decoder(model).config, "layer_types", None) or ()):
        return  # others keep their masks
    windows, shown = [], []

    def look(call):
        if call.query.shape[2] == n and call.mask is not None:
            last = call.mask[0, 0, -1]
            shown.append(int((last if last.dtype == torch.bool else last == 0).sum()))
        else:
            shown.append(n)
        windows.append(sliding_window(call, find_decoder(model).config) or n)

    with watched_attention(find_causal_lm(model), look), torch.no_grad():
        model(tokens(1, n), use_cache=False)
    assert windows == shown


def gradients(model):
    return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def same_gradients(actual, expected):
    largest = max(g.abs().max().item() for g in expected.values())
    assert 0 < largest < float("inf")
    for name, gradient in expected.items():
        error, size = (actual[name] - gradient).abs().max().item(), gradient.abs().max().item()
        assert error <= 1e-3 * size + 1e-6 * largest, f"{name}: off by {error} of {size}"


@dataclass(frozen=True)
class Shift(View):
    """r(t) = t + 13: of ours none shifts all positions, which RoPE does not see."""

    def draw(self, length, key):
        return {}

    def rope_index(self, t, parameters):
        return t + 13


@every_family
@torch.no_grad()
def test_view(model, record_property):
    if model is None:
        return
    ids = tokens(2, N)
    other = ids.clone()
    other[:, 0] = 3 + (ids[:, 0] - 2) % 90
    plain = logits(model, ids)
    reach = (logits(model, other) - plain)[:, -1].abs().max()
    with described(model, "views", record_property):
        with rope_view(model, "standard"):
            assert torch.equal(logits(model, ids), plain), "the identity view changes logits"
        with rope_view(model, Shift()):
            shifted = logits(model, ids)
        if why_not_relative(find_decoder(model)) is None:
            same(shifted, plain, "a shift of all positions")
        else:
            assert (shifted - plain).abs().max() > 1e-2 * plain.std()
        with rope_view(model, VIEW):
            seen = logits(model, ids)
            moved = (logits(model, other) - seen)[:, -1].abs().max()
        same(seen[:, :SPLIT], plain[:, :SPLIT], "the prefix of a skip")
        assert (seen - plain)[:, SPLIT:].abs().max() > 1e-4 * plain.std(), "a skip changes nothing"
        assert moved > 0.1 * reach > 0, "token 0 does not reach the last row under a view"
    assert torch.equal(logits(model, ids), plain), "the model is not as it was"


def reloaded(model, folder, ids):
    """Logits of what plain Transformers loads from what the model saves."""
    model.save_pretrained(folder)
    loaded = type(model).from_pretrained(folder).eval()
    # what Transformers loses of this family's weights without us is no matter of RoPE
    loaded.load_state_dict(model.state_dict())
    return logits(loaded, ids)


@pytest.mark.parametrize(
    "method", ["yarn", *(pytest.param(method, marks=pytest.mark.slow) for method in ("pi", "abf"))]
)
@every_family
@torch.no_grad()
def test_rescaling(model, method, tmp_path, record_property):
    if model is None:
        return
    ids = tokens(2, N)
    plain = logits(model, ids)
    with refusals(record_property):
        patch_model(model, method, **RESCALINGS[method])
        seen = logits(model, ids)
        assert not torch.equal(seen, plain), "a rescaling changes nothing"
        actual = reloaded(model, tmp_path, ids)
        unpatch_model(model)
        if not torch.equal(actual, seen):
            # sums of some families depend on where in memory their weights are, also without us
            assert not torch.equal(reloaded(model, tmp_path, ids), plain), "reloaded, the model gives other logits"
            torch.testing.assert_close(actual, seen, rtol=0, atol=1e-6)
    assert torch.equal(logits(model, ids), plain), "the model is not as it was"


@every_family
@torch.no_grad()
def test_query_scale(model, record_property):
    """Queries scaled by a rescaling give the logits of attention whose queries are multiplied, also with n heads."""
    if model is None:
        return
    config = find_decoder(model).config
    types = getattr(config, "layer_types", None)

    def scaled(call):
        if types and re.search("sliding|chunked", types[call.module.layer_idx]):
            return None
        s = 1 + 0.3 * torch.log(1 + torch.arange(call.query.shape[2]) // 2)
        return call.with_inputs(call.query * s[:, None], call.key, call.value, call.mask)

    batches = [tokens(2, n) for n in (N, config.num_attention_heads)]
    plain = [logits(model, ids) for ids in batches]
    with watched_attention(find_causal_lm(model), scaled):
        expected = [logits(model, ids) for ids in batches]
    with refusals(record_property) as reasons:
        patch_model(model, "temperature", beta=0.3, original_max_position_embeddings=2)
        for ids, right, before in zip(batches, expected, plain, strict=True):
            assert (right - before).abs().max() > 1e-3 * before.std()
            same(logits(model, ids), right, f"scaled queries of {ids.shape[1]} tokens")
        unpatch_model(model)
    assert reasons or all(torch.equal(logits(model, ids), before) for ids, before in zip(batches, plain, strict=True))


@half_of_families(0)
@torch.no_grad()
def test_decoding(model, record_property):
    """With a cache, under indices of 3 t, as without one; whatever kind of layer comes first."""
    if not takes_views(model, record_property):
        return
    ids, begun = tokens(2, N), N - 3

    def decoded():
        parts = [model(ids[:, :begun], use_cache=True)]
        cache = returned_cache(parts[0])
        for t in range(begun, N):
            given = {} if cache is None else cache_argument(model, cache)
            parts.append(model(ids[:, t : t + 1], position_ids=torch.full((2, 1), t), use_cache=True, **given))
        return cache, torch.cat([part.logits for part in parts], 1)

    try:
        plain, (_, actual) = logits(model, ids), decoded()
    except RuntimeError:
        return  # the family itself fails here, as Dory's in Transformers 5.24
    if (actual - plain).abs().max() > 1e-4 * plain.std() or hasattr(find_decoder(model).config, "index_topk"):
        return  # wrong without us too, as where an indexer's top scores tie
    with refusals(record_property):
        with rope_view(model, index=3 * torch.arange(N)[None]):
            cache, actual = decoded()
            same(actual, logits(model, ids), "decoding with a cache")
        if cache is not None:
            with pytest.raises(ValueError, match="the cache holds keys at"):
                model(ids[:, :1], position_ids=torch.full((2, 1), N), **cache_argument(model, cache))


@half_of_families(1)
@torch.no_grad()
def test_native_rope(model, record_property):
    if model is None:
        return
    ids = tokens(2, N)
    plain = logits(model, ids)
    for method, options in RESCALINGS.items():  # the first that this family takes
        with refusals(lambda *_: None) as refused:
            patch_model(model, method, **options)
        if not refused:
            break
    else:
        record_property("refused", refused[0])
        return
    seen = logits(model, ids)
    with described(model, "native_rope", record_property):
        with native_rope(model):
            assert torch.equal(logits(model, ids), plain)
    assert torch.equal(logits(model, ids), seen)


@half_of_families(0)
@torch.no_grad()
def test_capture(model, record_property):
    if not takes_views(model, record_property):
        return
    ids, ran = tokens(2, N), set()
    for module in model.modules():
        attends = re.search(r"(?<!Linear)(?<!Lightning)(?<!Delta)(Attention|MLA)$", type(module).__name__)
        if attends and hasattr(module, "layer_idx"):
            module.register_forward_hook(lambda m, *_: ran.add(m.layer_idx))
    copy = CopiedTeacher(model)
    patch_model(model, VIEW)

    def captured(view):
        distiller = RelationDistiller(model, RelationTargets(), copy)
        request = distiller.request(ids)
        request.teaching = True  # what it does with a teacher's tensors is to record them
        with distiller.active(), rope_view(model, view):
            model(ids, use_cache=False, **{REQUEST: request})
        return request.teacher

    with described(model, "relation distillation", record_property):
        plain, seen = captured("standard"), captured(VIEW)
        assert plain.keys() == seen.keys() == ran, f"attention ran in layers {ran}, captured are {set(plain)}"
        for layer in ran:
            for name, tensor in plain[layer].items():
                assert tensor.shape[2] == N
                same(seen[layer][name][:, :, :SPLIT], tensor[:, :, :SPLIT], f"{name} of layer {layer}, prefix")
        first = min(plain)
        same(seen[first]["v"], plain[first]["v"], "v of the first attention")
        changes = [(plain[i][name] - seen[i][name])[:, :, SPLIT:].abs().max() for i in ran for name in "qk"]
        assert max(changes) > 1e-3, "what is captured is not after RoPE"


@half_of_families(1)
def test_relation_distillation(model, record_property):
    if not takes_views(model, record_property):
        return
    model, ids = patch_model(model.train(), VIEW), tokens(2, N)
    view_source(model).clock.set(0, 0)  # else the first forward looks for an optimizer, through all objects
    teacher = CopiedTeacher(model)
    with described(model, "relation distillation", record_property):
        distiller = RelationDistiller(model, RelationTargets(), teacher)
        request = distiller.request(ids)
        with distiller.active():
            model(input_ids=ids, use_cache=False, logits_to_keep=1, **{REQUEST: request})
            loss = sum(request.loss(name) for name in "qkv")
            loss.backward()
        assert torch.isfinite(loss) and loss > 1e-6
        result = gradients(model).values()
        assert all(torch.isfinite(g).all() for g in result) and any(g.abs().max() > 0 for g in result)


def distilled(model, ids, one_pass):
    """Request and gradients of one step."""
    model.zero_grad()
    distiller = SelfDistiller(model, ViewConsistency(), one_pass=one_pass)
    distiller.view.clock.set(3, 0)
    labelled = Labelled.of({"input_ids": ids, "labels": ids})
    request = ViewRequest(labelled, labelled.n_labels, labelled.n_documents)
    with distiller.active():
        model(input_ids=ids, use_cache=False, logits_to_keep=1, **{REQUEST: request})
        request.result.loss.backward()
    return request, gradients(model)


@half_of_families(0)
def test_self_distillation(model, record_property):
    if not takes_views(model, record_property):
        return
    model, ids = patch_model(model.train(), VIEW), tokens(2, N)
    with described(model, "self-distillation", record_property):
        request, actual = distilled(model, ids, one_pass=True)
        one_pass = request.attention is not None
        why = describe(model).missing_capabilities.get("self-distillation in one pass")
        assert why is None or not one_pass
        if not one_pass:
            record_property("two passes", why or "the model passes finished 4D masks to its decoder.")
        with torch.no_grad(), rope_view(model, "standard"):
            plain = logits(model, ids)
        with torch.no_grad(), rope_view(model, VIEW):
            seen = logits(model, ids)
        ce = F.cross_entropy(plain[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        p, q = seen.log_softmax(-1)[:, SPLIT:-1], plain.log_softmax(-1)[:, SPLIT:-1]
        kl = (p.exp() * (p - q)).sum(-1).sum(1).mean() / (N - SPLIT)
        assert kl > 1e-6
        torch.testing.assert_close(request.result.loss.detach(), ce + kl, rtol=1e-4, atol=1e-5)
        if one_pass:
            _, expected = distilled(model, ids, one_pass=False)
            same_gradients(actual, expected)
        else:
            assert 0 < max(g.abs().max() for g in actual.values()) < float("inf")


@half_of_families(1)
def test_checkpointing(model, record_property):
    if not takes_views(model, record_property):
        return
    if not model.supports_gradient_checkpointing:
        record_property("refused", "Transformers has no gradient checkpointing for this family.")
        return
    model.train()
    ids = tokens(2, N)

    def step():
        model.zero_grad()
        with rope_view(model, VIEW):
            out = logits(model, ids)
        F.cross_entropy(out[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        return gradients(model)

    with described(model, "gradient checkpointing", record_property):
        expected = step()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        same_gradients(step(), expected)


def test_llama_is_refused_nothing():
    """The rule that lets a family refuse lets none of its plain members do so."""
    assert describe(tiny_family("llama")).missing_capabilities == {}
