"""The config that is saved, the config of the decoder and the frequencies in force say the same."""

import copy
import pickle

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.families import tiny_family
from support.tiny import tiny, tokens
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from rope_patch import load_adapter, native_rope, patch_model, rope_view, unpatch_model
from rope_patch.forward.config_checks import require_frequencies_of_config
from rope_patch.rescalings.in_place import RopeParameters

IDS = tokens(1, 80)


@torch.no_grad()
def logits(model):
    return model(IDS).logits


def apart(model):
    model.config = copy.deepcopy(model.config)
    return model


def test_a_rescaling_of_one_of_two_configs_is_refused():
    model = apart(tiny())
    plain = logits(model)
    with pytest.raises(
        ValueError, match="the config of this LlamaForCausalLM and that of its LlamaModel, .* are different objects"
    ):
        patch_model(model, "pi", factor=2.0)
    assert torch.equal(logits(model), plain) and not hasattr(model.model, "_rope_patch")
    patch_model(model, "skip")  # writes no config
    model.config = model.model.config
    patch_model(model, "pi", factor=2.0)


@pytest.mark.parametrize("wrap", [False, True], ids=["bare", "PEFT"])
def test_what_would_be_saved_as_another_model_is_not_saved(wrap, tmp_path):
    native = copy.deepcopy(tiny().config)
    model = patch_model(tiny(), "pi", factor=2.0)
    outer = get_peft_model(model, LoraConfig(target_modules=["q_proj"])) if wrap else model
    model.config = native
    for call in (lambda: outer.save_pretrained(tmp_path), outer.state_dict, lambda: patch_model(outer, "skip")):
        with pytest.raises(ValueError, match="the saved model would be another one"):
            call()
    with native_rope(outer), pytest.raises(ValueError, match="the saved model would be another one"):
        outer.state_dict()
    model.config = model.model.config
    with native_rope(outer), rope_view(outer, "skip"):
        outer.state_dict()
    outer.save_pretrained(tmp_path)
    model.model.config.rope_parameters = native.rope_parameters  # one object, edited
    with pytest.raises(ValueError, match="the saved model would be another one"):
        outer.state_dict()
    unpatch_model(outer).state_dict()


def test_a_patch_of_the_inner_model_is_saved_with_it_or_not_at_all(tmp_path):
    model = tiny()
    patch_model(model.model, "pi", factor=2.0)
    with pytest.raises(ValueError, match="the saved model would be another one"):
        model.save_pretrained(tmp_path)
    model.config = model.model.config
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(model))


def test_a_config_that_was_copied_after_the_patch(tmp_path):
    model = apart(patch_model(tiny(), "pi", factor=2.0))
    model.save_pretrained(tmp_path / "rescaled")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "rescaled")), logits(model))
    unpatch_model(model).save_pretrained(tmp_path / "native")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "native")), logits(tiny()))


@pytest.mark.parametrize("method", ["pi", "abf", "skip"])
def test_frequencies_that_are_not_those_of_the_config_are_refused(method):
    options = {"pi": {"factor": 2.0}, "abf": {"theta": 1e6}, "skip": {}}[method]
    model = tiny()
    other = LlamaForCausalLM(model.config)  # the two share a config, which somebody edits for the one
    model.config.rope_parameters = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    plain = logits(other)
    with pytest.raises(ValueError, match="are not those of its config"):
        patch_model(other, method, **options)
    assert torch.equal(logits(other), plain) and not hasattr(other.model, "_rope_patch")
    patch_model(other, "standard")  # neither reads the config nor moves a position
    patch_model(LlamaForCausalLM(model.config), method, **({"factor": 2.0} if method == "pi" else options))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["default", "yarn", "dynamic", "longrope", "llama3"])
def test_casts_and_frequencies_of_the_last_forward_pass(kind, dtype):
    scaling = {
        "default": {},
        "yarn": {"factor": 2.0},
        "dynamic": {"factor": 2.0},
        "longrope": {"factor": 2.0, "short_factor": [1.0] * 4, "long_factor": [1.0, 1.5, 2.0, 3.0],
                     "original_max_position_embeddings": 32},
        "llama3": {"factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                   "original_max_position_embeddings": 32},
    }[kind]  # fmt: skip
    model = tiny(rope_parameters={"rope_type": kind, "rope_theta": 10000.0, **scaling})
    built = model.model.rotary_emb.inv_freq.clone()
    logits(model)  # longer than the window: dynamic RoPE types move on
    assert torch.equal(model.model.rotary_emb.inv_freq, built) == (kind not in ("dynamic", "longrope"))
    require_frequencies_of_config(RopeParameters.of(model.to(dtype).model), model.model)
    model.config.rope_parameters = {"rope_type": "default", "rope_theta": 11000.0}
    with pytest.raises(ValueError, match="are not those of its config"):
        require_frequencies_of_config(RopeParameters.of(model.model), model.model)


@pytest.mark.parametrize("family", ["gemma3", "deepseek_v3", "modernbert-decoder"])
def test_families_that_nest_configs_or_have_schedules_by_layer(family):
    patch_model(tiny_family(family), "yarn", factor=2.0).state_dict()


@pytest.mark.parametrize(("inner", "compiled"), [(False, False), (True, False), (True, True)])
def test_weights_that_were_gathered_elsewhere_are_checked_too(inner, compiled, tmp_path):
    """DeepSpeed ZeRO-3 collects weights parameter by parameter and hands them to `save_pretrained`."""
    model = tiny(num_hidden_layers=1)
    native = copy.deepcopy(model.config)
    patch_model(model.model if inner else model, "pi", factor=2.0)
    gathered = {name: p.detach() for name, p in model.named_parameters()}
    if inner:  # a decoder learns of the model around it when that is called
        torch._dynamo.reset()
        logits(torch.compile(model, backend="eager") if compiled else model)
    else:
        model.config = native
    for saved in (model, torch.compile(model, backend="eager")):
        with pytest.raises(ValueError, match="the saved model would be another one"):
            saved.save_pretrained(tmp_path, state_dict=gathered)
    assert not any(tmp_path.iterdir())
    model.config = model.model.config
    model.save_pretrained(tmp_path, state_dict=gathered)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(model))
    unpatch_model(model)
    assert "save_pretrained" not in vars(model)


@pytest.mark.parametrize("make", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_a_copy_saves_itself(make, tmp_path):
    model = patch_model(tiny(), "pi", factor=2.0)
    other = make(model)
    with torch.no_grad():
        other.lm_head.weight.zero_()
    other.save_pretrained(tmp_path, state_dict=dict(other.named_parameters()))
    assert not logits(AutoModelForCausalLM.from_pretrained(tmp_path)).any() and logits(model).any()
    model.config = copy.deepcopy(tiny().config)
    other.save_pretrained(tmp_path)


@pytest.mark.parametrize(
    "call", [lambda model: rope_view(model, "skip").__enter__(), lambda m: patch_model(m, "standard")]
)
def test_rounded_frequencies_are_not_healed_by_a_config_of_others(call):
    model = tiny().to(torch.bfloat16)
    model.config.rope_parameters = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    plain = logits(model)
    with pytest.raises(ValueError, match="are not those of its config"):
        call(model)
    assert torch.equal(logits(model), plain) and not hasattr(model.model, "_rope_patch")


def test_a_model_that_nobody_holds_is_saved(tmp_path):
    patch_model(tiny(), "pi", factor=2.0).save_pretrained(tmp_path / "patched")
    model = get_peft_model(patch_model(tiny(), "pi", factor=2.0), LoraConfig(target_modules=["q_proj"]))
    model.save_pretrained(tmp_path / "adapter")
    load_adapter(tiny(), tmp_path / "adapter").merge_and_unload().save_pretrained(tmp_path / "merged")
    for name in ("patched", "merged"):
        again = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert torch.equal(logits(again), logits(model))
