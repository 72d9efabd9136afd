"""What a first user gets wrong is answered with what to do, and two models that share a config stay two models."""

import copy
import logging

import pytest
import torch
from support.tiny import WINDOW, gemma3, tiny, tokens
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    LlamaForQuestionAnswering,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
)

from rope_patch import VIEWS, describe, load_adapter, patch_model, unpatch_model
from rope_patch.losses import SelfDistiller, ViewConsistency
from rope_patch.methods import resolve_rescaling


def test_swapped_arguments_are_named():
    with pytest.raises(ValueError, match=r"swapped: .*patch_model\(model, 'yarn'\); got a LlamaForCausalLM"):
        patch_model("yarn", tiny(), factor=2.0)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("linear", "pi"),
        ("position_interpolation", "pi"),
        ("Position-Interpolation", "pi"),
        ("ntk-aware", "ntk"),
        ("dynamic", "dynamic-ntk"),
        ("Dynamic NTK", "dynamic-ntk"),
        ("llama-3.1", "llama3"),
        ("deepseek_yarn", "yarn"),
        ("rope_theta", "abf"),
        ("su", "longrope"),
        ("clipped rope", "cope"),
        ("rope", "standard"),
        ("default", "standard"),
    ],
)
def test_names_that_others_use_lead_to_ours(name, meant):
    with pytest.raises(ValueError, match=f"Unknown method .* Did you mean '{meant}'"):
        patch_model(tiny(), name)


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("Self_Extend", "STRING is here: rope_patch.string_positions"),
        ("LongRoPE2", "'longrope' takes the divisors"),
        ("proportional", "'abf' keeps it"),
        ("dual chunk attention", "STRING is here: rope_patch.string_positions"),
    ],
)
def test_a_method_that_is_not_here_is_answered_with_the_nearest(name, answer):
    with pytest.raises(ValueError, match=f"Unknown method {name!r}. .*{answer}.* Known: abf, ") as error:
        patch_model(tiny(), name)
    assert "Did you mean" not in str(error.value)
    with pytest.raises(ValueError, match=answer):
        resolve_rescaling(name)
    with pytest.raises(ValueError, match=answer):
        VIEWS[name]


def test_a_synonym_of_a_view_is_not_offered_as_a_rescaling():
    with pytest.raises(ValueError) as error:
        resolve_rescaling("rope")
    assert "'standard'" not in str(error.value)


def test_a_model_without_rope_is_told_what_to_use_instead():
    gpt2 = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=11))
    with pytest.raises(ValueError, match="no RoPE that can be patched: .* Use a model whose decoder has a rotary"):
        patch_model(gpt2, "pi", factor=2.0)


@pytest.mark.parametrize(
    "model_class", [LlamaForSequenceClassification, LlamaForTokenClassification, LlamaForQuestionAnswering]
)
def test_a_model_without_a_head_over_the_vocabulary_is_described(model_class):
    """They can be patched, as reward models are, and are told why nothing distils them."""
    model = model_class(tiny().config).eval()
    for patch in (False, True):
        if patch:
            patch_model(model, "yarn", factor=4.0)
        missing = describe(model).missing_capabilities
        assert set(missing) == {"self-distillation"}
        assert missing["self-distillation"].startswith(f"{model_class.__name__} has no output head over the vocabulary")
    patch_model(model, "skip")
    with pytest.raises(ValueError, match="has no output head over the vocabulary"):
        SelfDistiller(model, ViewConsistency())


@pytest.mark.parametrize("wrap", [False, True], ids=["bare", "peft"])
def test_models_that_share_a_config_object_stay_two_models(wrap, tmp_path):
    first = tiny()
    second = LlamaForCausalLM(first.config).eval()
    assert first.config is second.config
    model = first
    if wrap:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(first, LoraConfig(target_modules=["q_proj"]))
    native, ids = copy.deepcopy(second.config.to_dict()), tokens(1, 90)
    patch_model(model, "yarn", factor=4.0)
    description = describe(second)
    assert description.rope_parameters["rope_type"] == "default" and description.target_window == WINDOW
    assert second.config.to_dict() == native
    assert first.config.max_position_embeddings == 4 * WINDOW == model.config.max_position_embeddings
    assert {id(m.config) for m in first.modules() if hasattr(m, "config")} == {id(first.config)}
    for which, subject in (("one", first), ("other", second)):
        if wrap and which == "one":
            continue
        subject.save_pretrained(tmp_path / which)
        with torch.no_grad():
            again = AutoModelForCausalLM.from_pretrained(tmp_path / which)(ids).logits
            torch.testing.assert_close(again, subject(ids).logits)
    unpatch_model(model)
    for name in ("rope_parameters", "max_position_embeddings"):  # saving writes other fields, such as the class
        assert first.config.to_dict()[name] == native[name]


def test_nested_configs_are_copied_together():
    model = gemma3()
    outer = model.config
    patch_model(model, "abf", theta=5e6, max_position_embeddings=4 * WINDOW)
    assert model.config is not outer and outer.max_position_embeddings == WINDOW
    assert model.config.get_text_config() is model.get_decoder().config


def test_a_base_without_a_window_warns_that_the_old_one_is_declared(monkeypatch):
    said = []
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", False)
    monkeypatch.setattr("rope_patch.patch.logger.warning", said.append)
    model = patch_model(tiny(), "abf", theta=1e6)
    assert len(said) == 1 and f"max_position_embeddings={WINDOW}, where programs" in said[0]
    remedy = "a rescaling with max_position_embeddings"
    assert remedy in str(describe(model))
    wide = patch_model(tiny(), "abf", theta=1e6, max_position_embeddings=4 * WINDOW)
    yarn = patch_model(tiny(), "yarn", factor=2.0)
    assert len(said) == 1
    assert remedy not in str(describe(wide)) + str(describe(yarn)) + str(describe(tiny()))


def test_a_plain_load_of_an_adapter_is_not_said_to_have_no_rope(tmp_path):
    from peft import LoraConfig, PeftModel, get_peft_model

    adapted = get_peft_model(tiny(), LoraConfig(target_modules=["q_proj"]))
    patch_model(adapted, "yarn", factor=2.0).save_pretrained(tmp_path)
    assert (tmp_path / "rope_patch.json").is_file()
    said = str(describe(PeftModel.from_pretrained(tiny(), tmp_path)))
    assert "saved without RoPE" not in said and "whose folder has rope_patch.json" in said and "load_adapter" in said


def test_an_adapter_in_a_folder_that_is_not_there_is_said_to_be_so(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no directory .*nowhere: name the one"):
        load_adapter(tiny(), tmp_path / "nowhere")
