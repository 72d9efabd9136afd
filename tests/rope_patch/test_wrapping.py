"""A patched model in what people put around models, before and after the patch: PEFT, accelerate, compile, Liger."""

import copy
import json

import pytest
import torch
from accelerate import cpu_offload, dispatch_model
from accelerate.hooks import remove_hook_from_submodules
from peft import AdaLoraConfig, IA3Config, LoraConfig, get_peft_model
from support import cells, objectives, oracle
from support.tiny import tiny, tokens
from torch._dynamo.testing import CompileCounter
from transformers import AutoModelForCausalLM
from transformers.models.llama import modeling_llama

from rope_patch import load_adapter, native_rope, patch_model, rope_view, unpatch_model
from rope_patch.losses import RelationDistiller, RelationTargets, SharedTeacher
from rope_patch.views import Skip

L = 20
VIEW = Skip(split=8, skip=30)
LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False, "task_type": "CAUSAL_LM"}
ADAPTERS = {
    "lora": lambda: LoraConfig(**LORA),
    "dora": lambda: LoraConfig(**LORA, use_dora=True),
    "ia3": lambda: IA3Config(
        target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"], init_ia3_weights=False
    ),
    "adalora": lambda: AdaLoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM", total_step=10
    ),
}


def under_view(model, ids):
    with torch.no_grad(), rope_view(model, VIEW):
        return model(ids, use_cache=False).logits


def by_oracle(model, ids):
    """Logits under the view, of a model without wrappers, by its own frequencies."""
    t = torch.arange(L)
    index = torch.where(t >= 8, t + 30, t).expand(len(ids), L)
    visible = oracle.causal(L).expand(len(ids), L, L)
    rotary = model.model.rotary_emb
    return oracle.logits(
        oracle.weights_of(model), model.config, ids, index, visible, rotary.inv_freq, rotary.attention_scaling
    )


@pytest.mark.parametrize(
    ("kind", "order"),
    [
        ("lora", "patch first"), ("lora", "adapter first"), ("dora", "patch first"), ("ia3", "adapter first"),
        ("adalora", "patch first"),
    ],
)  # fmt: skip
def test_every_kind_of_adapter(kind, order, tmp_path):
    """Under a rescaling and a view, merged and not, saved and loaded."""
    ids = tokens(2, L)
    model = tiny()
    if order == "patch first":
        patch_model(model, "yarn", factor=2.0)
    torch.manual_seed(1)
    wrapped = get_peft_model(model, ADAPTERS[kind]())
    if order == "adapter first":
        patch_model(wrapped, "yarn", factor=2.0)
    wrapped.eval()
    seen = under_view(wrapped, ids)
    assert (seen - under_view(tiny(), ids)).abs().max() > 0.1
    merged = copy.deepcopy(wrapped).merge_and_unload()
    torch.testing.assert_close(seen.double(), by_oracle(merged, ids), rtol=1e-3, atol=2e-3)
    wrapped.save_pretrained(tmp_path / "adapter")
    assert torch.equal(under_view(load_adapter(tiny(), tmp_path / "adapter"), ids), seen)
    merged.save_pretrained(tmp_path / "merged")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(under_view(again, ids), seen, rtol=1e-3, atol=1e-3)


def test_several_adapters_share_the_rope(tmp_path):
    ids = tokens(1, L)
    torch.manual_seed(1)
    wrapped = patch_model(get_peft_model(tiny(), LoraConfig(**LORA), adapter_name="one"), "pi", factor=2.0)
    wrapped.add_adapter("two", LoraConfig(**LORA))
    wrapped.eval()
    seen = {}
    for name in ("one", "two"):
        wrapped.set_adapter(name)
        seen[name] = under_view(wrapped, ids)
    assert not torch.equal(seen["one"], seen["two"])
    wrapped.save_pretrained(tmp_path)
    for name in ("one", "two"):
        assert json.loads((tmp_path / name / "rope_patch.json").read_text())["rescalings"][0]["method"] == "pi"
        assert torch.equal(under_view(load_adapter(tiny(), tmp_path / name), ids), seen[name])
    wrapped.delete_adapter("two")
    wrapped.set_adapter("one")
    assert torch.equal(under_view(wrapped, ids), seen["one"])
    with torch.no_grad(), wrapped.disable_adapter(), native_rope(wrapped):
        assert torch.equal(wrapped(ids).logits, tiny()(ids).logits)


def test_a_merged_adapter_leaves_no_teacher_and_keeps_views():
    ids = tokens(1, L)
    wrapped = patch_model(get_peft_model(tiny(), LoraConfig(**LORA)), "pi", factor=2.0).eval()
    seen = under_view(wrapped, ids)
    distiller = RelationDistiller(wrapped, RelationTargets(), SharedTeacher(wrapped))
    wrapped.merge_adapter()
    torch.testing.assert_close(under_view(wrapped, ids), seen, rtol=1e-3, atol=1e-3)
    with pytest.raises(ValueError, match="call unmerge_adapter first"), distiller.teacher.ready():
        pass
    wrapped.unmerge_adapter()
    torch.testing.assert_close(under_view(wrapped, ids), seen, rtol=1e-3, atol=1e-3)


PLACES = {
    "cpu_offload": lambda model: cpu_offload(model, execution_device=torch.device("cpu")),
    "cpu_offload with buffers": lambda model: cpu_offload(
        model, execution_device=torch.device("cpu"), offload_buffers=True
    ),
    "dispatched": lambda model: dispatch_model(
        model, {"model.embed_tokens": "cpu", "model": "cpu", "lm_head": "cpu"}, main_device="cpu", force_hooks=True
    ),
}


@pytest.mark.parametrize(
    ("place", "order"),
    [
        ("cpu_offload", "patch first"), ("cpu_offload with buffers", "patch first"),
        ("cpu_offload with buffers", "placed first"), ("dispatched", "placed first"),
    ],
)  # fmt: skip
def test_weights_that_accelerate_moves(place, order):
    """Hooks that bring weights from elsewhere for each forward keep view and RoPE parameters, and give them back."""
    ids = tokens(2, L)
    plain, expected = tiny()(ids).logits, under_view(patch_model(tiny(), "yarn", factor=2.0), ids)
    model = tiny()
    if order == "patch first":
        patch_model(model, "yarn", factor=2.0)
    PLACES[place](model)
    if order == "placed first":
        patch_model(model, "yarn", factor=2.0)
    assert torch.equal(under_view(model, ids), expected)
    with torch.no_grad():
        with native_rope(model):
            assert torch.equal(model(ids).logits, plain)
        assert not torch.equal(model(ids).logits, plain)
        assert torch.equal(unpatch_model(model)(ids).logits, plain)
        remove_hook_from_submodules(model)


def test_weights_on_the_disk(tmp_path):
    tiny().save_pretrained(tmp_path / "model", max_shard_size="20KB")
    ids = tokens(2, L)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model",
        device_map={"model.embed_tokens": "cpu", "model.layers": "disk", "model.norm": "cpu", "lm_head": "cpu",
                    "model.rotary_emb": "cpu"},
        offload_folder=tmp_path / "disk",
    )  # fmt: skip
    assert any(p.is_meta for p in model.parameters())
    patch_model(model, "yarn", factor=2.0)
    assert torch.equal(under_view(model, ids), under_view(patch_model(tiny(), "yarn", factor=2.0), ids))


@pytest.mark.slow
@pytest.mark.parametrize("view", [v for v in cells.CASES if not v.startswith("per-layer")])
def test_every_view_compiles_to_one_graph_for_all_its_draws(view):
    torch._dynamo.reset()
    ids = tokens(2, L)
    eager, compiled = (patch_model(tiny(), cells.CASES[view].view).train() for _ in range(2))
    frames = CompileCounter()
    run = torch.compile(compiled, backend=frames, fullgraph=True)
    losses = [[m(ids, labels=ids, use_cache=False).loss.item() for _ in range(3)] for m in (eager, run)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert frames.frame_count == 1


@pytest.mark.slow
@pytest.mark.parametrize("view", ["per-layer", "per-layer-top"])
def test_layers_with_draws_of_their_own_compile_in_parts(view):
    torch._dynamo.reset()
    ids = tokens(2, L)
    eager, compiled = (patch_model(tiny(), cells.CASES[view].view).train() for _ in range(2))
    frames = CompileCounter()
    run, counts = torch.compile(compiled, backend=frames), []
    for _ in range(4):
        losses = [m(ids, labels=ids, use_cache=False).loss.item() for m in (eager, run)]
        assert losses[1] == pytest.approx(losses[0], rel=1e-5)
        counts.append(frames.frame_count)
    assert counts[0] == counts[-1]


@torch.no_grad()
def test_beams_see_the_view_with_and_without_a_cache():
    ids, model = tokens(2, L), tiny()
    with rope_view(model, VIEW):
        cached, plain = (
            model.generate(ids, num_beams=3, max_new_tokens=6, do_sample=False, eos_token_id=None, use_cache=use_cache)
            for use_cache in (True, False)
        )
    assert torch.equal(cached, plain)
    assert not torch.equal(
        cached, model.generate(ids, num_beams=3, max_new_tokens=6, do_sample=False, eos_token_id=None)
    )


@pytest.mark.slow
@torch.no_grad()
def test_compiled_decoding_keeps_the_draws():
    torch._dynamo.reset()
    ids, model = tokens(2, L), tiny()
    with rope_view(model, Skip(), seed=3):
        expected = model.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None)
    run = torch.compile(model, backend="eager")
    with rope_view(model, Skip(), seed=3):
        out = run(ids, use_cache=True)
        tokens_out = [out.logits[:, -1].argmax(-1)]
        for _ in range(3):
            out = run(tokens_out[-1][:, None], past_key_values=out.past_key_values, use_cache=True)
            tokens_out.append(out.logits[:, -1].argmax(-1))
    assert torch.equal(torch.stack(tokens_out, 1), expected[:, L:])


class _TurnsInPlace(torch.autograd.Function):
    """What Liger puts in place of Llama's rotation: it overwrites its inputs, in backward too."""

    @staticmethod
    def forward(ctx, q, k, cos, sin):
        ctx.save_for_backward(cos, sin)
        return _turn(q, cos, sin), _turn(k, cos, sin)

    @staticmethod
    def backward(ctx, dq, dk):
        cos, sin = ctx.saved_tensors
        return _turn(dq, cos, -sin), _turn(dk, cos, -sin), None, None


def _turn(x, cos, sin):
    # its kernel sees [batch, seq_len, heads, head_dim], and copies only where that is not contiguous
    x, (cos, sin) = x.transpose(1, 2).contiguous(), (y[:, :, None] for y in (cos, sin))
    return x.copy_(x * cos + modeling_llama.rotate_half(x) * sin).transpose(1, 2)


@pytest.mark.parametrize("objective", objectives.OBJECTIVES)
def test_a_rotation_that_overwrites_its_input(objective, monkeypatch):
    cell, actual = cells.cell("right-padded"), []
    for in_place in (False, True):
        if in_place:
            monkeypatch.setattr(
                modeling_llama, "apply_rotary_pos_emb", lambda q, k, cos, sin, **_: _TurnsInPlace.apply(q, k, cos, sin)
            )
        model = tiny(dtype=torch.float64)
        loss = objectives.loss_and_gradients(objective, model, cell.inputs, objectives.divisors_of(cell))
        actual.append((model, loss, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}))
    (_, wanted_loss, expected), (model, loss, _) = actual
    objectives.compare(model, loss, (wanted_loss, expected), 1e-5)


@pytest.mark.parametrize("objective", objectives.OBJECTIVES)
def test_reentrant_checkpointing(objective):
    """PEFT's prepare_model_for_kbit_training leaves it behind; relations, found inside layers, get no gradient then."""
    cell = cells.cell("right-padded")
    divisors, models, losses = objectives.divisors_of(cell), [], []
    for reentrant in (False, True):
        models.append(tiny())
        if reentrant:
            models[-1].gradient_checkpointing_enable({"use_reentrant": True})
            models[-1].enable_input_require_grads()
            if objective in objectives.RELATIONS:
                with pytest.raises(ValueError, match="whose default is reentrant"):
                    objectives.loss_and_gradients(objective, models[-1], cell.inputs, divisors)
                return
        losses.append(objectives.loss_and_gradients(objective, models[-1], cell.inputs, divisors))
    expected = {n: p.grad.double() for n, p in models[0].named_parameters() if p.grad is not None}
    objectives.compare(models[1], losses[1], (losses[0], expected), 1e-4)
