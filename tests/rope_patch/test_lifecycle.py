"""A patched model through what people do to models: copies, pickles, PEFT, compile, generation, undo."""

import copy
import io

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.tiny import WINDOW, tiny, tokens
from torch._dynamo.testing import CompileCounter
from transformers import AutoModelForCausalLM

from rope_patch import describe, load_adapter, native_rope, patch_model, rope_view, unpatch_model
from rope_patch.patch import view_source
from rope_patch.views import Cyclic, PosAug, Skip, Uniform

L = 20


def lora(**kwargs):
    return LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM", **kwargs
    )


def test_patching_returns_the_same_object_and_twice_is_once():
    model = tiny()
    assert patch_model(model, "skip") is model and patch_model(model, PosAug()) is model
    hooks = [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()]
    patch_model(patch_model(model, "skip"), "yarn", factor=2.0)
    assert [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()] == hooks
    assert describe(model).view == repr(Skip())
    assert unpatch_model(model) is model and unpatch_model(model) is model


def test_patching_keeps_the_keys_of_the_state_dict():
    model = tiny()
    keys = list(model.state_dict())
    assert list(patch_model(patch_model(model, "skip"), "yarn", factor=2.0).state_dict()) == keys


def test_describe_says_what_is_in_force():
    model = tiny()
    assert str(describe(model)).startswith("LlamaForCausalLM: not patched")
    patch_model(patch_model(model, "yarn", factor=4.0), "skip", skip=Uniform(1, 99))
    text = str(describe(model))
    for part in (
        "LlamaForCausalLM: patched",
        f"yarn (rope_theta 10000.0, factor 4.0, original_max_position_embeddings {WINDOW})",
        "native          default (rope_theta 10000.0)",
        "yarn (factor 4.0)",
        "Skip(split=Uniform(low=0, high=None), skip=Uniform(low=1, high=99)), sampled in training forwards",
        f"trained window  {WINDOW} positions",
        f"target window   {4 * WINDOW} positions",
        "rotary_emb",
    ):
        assert part in text


@pytest.mark.parametrize("how", ["deepcopy", "torch.save"])
def test_a_copy_goes_on_alone(how):
    model = patch_model(patch_model(tiny(), "yarn", factor=2.0), "skip").train()
    ids = tokens(2, L)
    model(ids, use_cache=False)
    if how == "deepcopy":
        twin = copy.deepcopy(model)
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    assert view_source(twin) is not view_source(model)
    assert all(torch.equal(model(ids, use_cache=False).logits, twin(ids, use_cache=False).logits) for _ in range(2))
    unpatch_model(twin)
    assert describe(model).patched and not describe(twin).patched
    model(ids, use_cache=False)


def test_load_adapter_refuses_what_does_not_fit(tmp_path):
    model = patch_model(get_peft_model(tiny(), lora()), "yarn", factor=2.0)
    model.save_pretrained(tmp_path / "ours")
    unpatch_model(model)
    model.save_pretrained(tmp_path / "plain")
    assert not (tmp_path / "plain" / "rope_patch.json").exists()
    with pytest.raises(FileNotFoundError, match="was not saved from a model patched by rope_patch"):
        load_adapter(tiny(), tmp_path / "plain")
    with pytest.raises(ValueError, match="call unpatch_model first"):
        load_adapter(patch_model(tiny(), "skip"), tmp_path / "ours")
    other = tiny(rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    with pytest.raises(ValueError, match="was trained on a base model with RoPE .* this model has"):
        load_adapter(other, tmp_path / "ours")
    assert not describe(other).patched
    (tmp_path / "ours" / "rope_patch.json").write_text('{"format": 99}')
    with pytest.raises(ValueError, match="must hold an object as rope_parameters, got None"):
        load_adapter(tiny(), tmp_path / "ours")


def test_what_deepspeed_counts_on_a_rotary_module_is_not_of_its_schedule():
    """ZeRO-3 numbers every module and counts its calls: other RoPE parameters for a while change neither."""
    model = patch_model(tiny(), "pi", factor=4.0)
    rotary = model.model.rotary_emb
    rotary.ds_id, rotary.ds_grads_remaining, rotary.applied_pre_backward_ref_cnt = 7, 0, 0
    with native_rope(model):
        rotary.ds_grads_remaining = rotary.applied_pre_backward_ref_cnt = 1
    unpatch_model(model)
    assert (rotary.ds_id, rotary.ds_grads_remaining, rotary.applied_pre_backward_ref_cnt) == (7, 1, 1)


def test_compile_takes_new_draws_without_tracing_again():
    ids = tokens(2, L)
    eager, compiled = (patch_model(tiny(num_hidden_layers=1), "skip").train() for _ in range(2))
    frames = CompileCounter()
    run = torch.compile(compiled, backend=frames, fullgraph=True)
    losses = []
    for model in (eager, run):
        losses.append([model(ids, labels=ids, use_cache=False).loss.item() for _ in range(3)])
    assert len(set(losses[0])) == 3
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert frames.frame_count == 1


@pytest.mark.slow  # compiles
def test_compiled_gradients_under_checkpointing():
    ids = tokens(2, L)
    gradients = []
    for compiled in (False, True):
        model = patch_model(tiny(), "posaug").train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        run = torch.compile(model, backend="aot_eager") if compiled else model
        run(ids, labels=ids, use_cache=False).loss.backward()
        gradients.append({n: p.grad for n, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("view", "cache"),
    [(Skip(split=5, skip=30), "static"), (Cyclic(shift=3), "dynamic"), (PosAug(0.5), "dynamic")],
    ids=lambda x: getattr(x, "name", x),
)
@torch.no_grad()
def test_generation_sees_the_same_view_with_and_without_cache(view, cache):
    model = tiny()
    ids = tokens(2, 9)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0  # left padding
    settings = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    with rope_view(model, view):
        fast = model.generate(ids, cache_implementation=cache, **settings)
        grown, index = ids, None
        for _ in range(6):  # the reference: no cache, indices by hand
            n = grown.shape[1]
            rows = []
            for pad in (3, 0):
                t = torch.arange(n - pad)
                real = 9 - pad
                r = {
                    "skip": torch.where(t >= 5, t + 30, t).double(),
                    "cyclic": torch.where(t + 3 < real, t + 3, t + 3 - real).double(),
                    "posaug": 0.5 * t.double(),
                }[view.name]
                rows.append(torch.cat([torch.zeros(pad).double(), r]))
            index = torch.stack(rows)
            full = torch.cat([mask, torch.ones(2, n - 9, dtype=mask.dtype)], 1)
            with rope_view(model, index=index):
                logits = model(grown, attention_mask=full, use_cache=False).logits[:, -1]
            grown = torch.cat([grown, logits.argmax(-1, keepdim=True)], 1)
    assert torch.equal(fast, grown)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "needs either a view or index="),
        ({"view": "skip", "index": torch.zeros(1, 2)}, "needs either a view or index="),
        ({"view": "yarn"}, "'yarn'"),
        ({"view": "pi"}, "'pi'"),
        ({"index": torch.zeros(5)}, "index must be a non-empty tensor \\[batch, seq_len\\]"),
        ({"index": torch.zeros(1, 5, dtype=torch.bfloat16)}, "16-bit floats are not exact beyond position 2048"),
        ({"index": [[0, 1]]}, "index must be a non-empty tensor"),
        ({"index": torch.full((1, 2), float("nan"))}, "index must be finite"),
        ({"index": torch.full((1, 2), 2**24 + 1)}, "within \\+-16777216"),
    ],
)
def test_what_rope_view_cannot_take_is_said(arguments, message):
    model = tiny()
    with pytest.raises(ValueError, match=message), rope_view(model, **arguments):
        pass
    assert not describe(model).patched


def test_undo_inside_a_block_is_refused():
    model = tiny()
    with rope_view(model, "nope"), pytest.raises(ValueError, match="leave the block first"):
        unpatch_model(model)


@torch.no_grad()
def test_a_view_leaves_no_trace_in_what_is_saved(tmp_path):
    model = patch_model(tiny(), "posaug", when="always")
    ids = tokens(1, L)
    model.save_pretrained(tmp_path)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits, tiny()(ids).logits)


@torch.no_grad()
def test_quantised_models(tmp_path):
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    tiny(hidden_size=64, intermediate_size=128, head_dim=16).save_pretrained(tmp_path)
    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=settings)
    ids = tokens(1, L)
    plain = model(ids, use_cache=False).logits
    patch_model(model, "yarn", factor=4.0)
    with native_rope(model), rope_view(model, "standard"):
        assert torch.equal(model(ids, use_cache=False).logits, plain)
    with rope_view(model, Skip(split=8, skip=30)):
        assert not torch.equal(model(ids, use_cache=False).logits[:, 8:], plain[:, 8:])
    assert torch.equal(unpatch_model(model)(ids, use_cache=False).logits, plain)
