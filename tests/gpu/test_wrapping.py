"""What people put around models, where only a GPU shows it: Liger, bitsandbytes, accelerate, generation compiled."""

import pytest
import torch
from accelerate import cpu_offload
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from support import cells, objectives
from support.tiny import tiny, tokens
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from transformers.models.llama import modeling_llama

from rope_patch import native_rope, patch_model, rope_view, unpatch_model
from rope_patch.losses import REQUEST, RelationDistiller, RelationTargets, SharedTeacher
from rope_patch.views import Skip

pytestmark = pytest.mark.gpu
L = 20
VIEW = Skip(split=8, skip=30)
SHAPE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}


def under_view(model, ids):
    with torch.no_grad(), rope_view(model, VIEW):
        return model(ids, use_cache=False).logits


@pytest.fixture
def liger(monkeypatch):
    """Applies Liger's kernels to a model."""
    kernels = pytest.importorskip("liger_kernel.transformers.monkey_patch")
    for name in ("apply_rotary_pos_emb", "LlamaRMSNorm", "LlamaMLP"):  # what it replaces in the module; put back
        monkeypatch.setattr(modeling_llama, name, getattr(modeling_llama, name))

    def apply(model):
        kernels.apply_liger_kernel_to_llama(model=model)
        assert "liger" in modeling_llama.apply_rotary_pos_emb.__module__
        return model

    return apply


@pytest.mark.parametrize("order", ["patch first", "Liger first"])
def test_liger(order, liger):
    ids = tokens(2, L).cuda()
    expected = under_view(patch_model(tiny().cuda(), "yarn", factor=2.0), ids)
    model = tiny().cuda()
    if order == "patch first":
        patch_model(model, "yarn", factor=2.0)
    liger(model)
    if order == "Liger first":
        patch_model(model, "yarn", factor=2.0)
    torch.testing.assert_close(under_view(model, ids), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("objective", objectives.OBJECTIVES)
def test_objectives_on_liger(objective, liger):
    """Its rotation overwrites what it is given, and its forward of the model stands in for Transformers'."""
    cell = cells.cell("right-padded").to("cuda")
    model = tiny().cuda()
    loss = objectives.loss_and_gradients(objective, model, cell.inputs, objectives.divisors_of(cell))
    expected = loss, {n: p.grad.double().cpu() for n, p in model.named_parameters() if p.grad is not None}
    model = liger(tiny().cuda())
    loss = objectives.loss_and_gradients(objective, model, cell.inputs, objectives.divisors_of(cell))
    objectives.compare(model, loss, expected, 1e-2)


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_weights_are_patched_taught_and_given_back(bits, tmp_path):
    pytest.importorskip("bitsandbytes")
    tiny(**SHAPE).save_pretrained(tmp_path)
    settings = BitsAndBytesConfig(load_in_4bit=bits == 4, load_in_8bit=bits == 8, bnb_4bit_compute_dtype=torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=settings, dtype=torch.bfloat16, device_map={"": 0}
    )
    ids = tokens(2, L).cuda()
    with torch.no_grad():
        plain = model(ids, use_cache=False).logits
    patch_model(model, "yarn", factor=4.0)
    with torch.no_grad(), native_rope(model):
        assert torch.equal(model(ids, use_cache=False).logits, plain)
    assert not torch.equal(under_view(model, ids)[:, 8:], plain[:, 8:])
    model = prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs={"use_reentrant": False})
    wrapped = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj"])).train()
    distiller = RelationDistiller(wrapped, RelationTargets(), SharedTeacher(wrapped))
    with distiller.active():
        request = distiller.request(ids)
        wrapped(input_ids=ids, use_cache=False, logits_to_keep=1, **{REQUEST: request})
        loss = sum(request.loss(name) for name in "qkv")
        loss.backward()
    assert loss.item() > 0
    gradients = [p.grad for n, p in wrapped.named_parameters() if "lora_B" in n]
    assert all(g is not None and g.isfinite().all() and g.norm() > 0 for g in gradients)
    with torch.no_grad(), wrapped.disable_adapter(), rope_view(wrapped, "standard"), native_rope(wrapped):
        taught = wrapped.eval()(input_ids=ids, use_cache=False).logits
    with torch.no_grad(), wrapped.disable_adapter():
        assert torch.equal(unpatch_model(wrapped)(input_ids=ids, use_cache=False).logits, taught)


def test_weights_that_wait_on_the_cpu():
    ids = tokens(2, L)
    expected = under_view(patch_model(tiny(), "yarn", factor=2.0).cuda(), ids.cuda())
    for order in ("patch first", "placed first"):
        model = tiny()
        if order == "patch first":
            patch_model(model, "yarn", factor=2.0)
        cpu_offload(model, execution_device=torch.device("cuda:0"))
        if order == "placed first":
            patch_model(model, "yarn", factor=2.0)
        torch.testing.assert_close(under_view(model, ids.cuda()), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("view", ["skip-drawn", "rpe-sample", "per-layer", "random-base"])
@torch.no_grad()
def test_generation_with_a_static_cache_which_compiles_is_that_with_a_dynamic_one(view):
    ids, texts = tokens(2, L).cuda(), []
    mask = torch.ones_like(ids)
    for cache in ("dynamic", "static"):
        torch._dynamo.reset()
        model = tiny(**SHAPE).cuda()
        with rope_view(model, cells.CASES[view].view, seed=3):
            texts.append(
                model.generate(
                    ids, attention_mask=mask, cache_implementation=cache, max_new_tokens=6, do_sample=False,
                    eos_token_id=None,
                )
            )  # fmt: skip
    assert torch.equal(*texts)
