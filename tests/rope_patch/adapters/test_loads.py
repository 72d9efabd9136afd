"""An adapter that PEFT or Transformers loads onto a patched model was trained with its RoPE, or is refused."""

import json
import warnings

import pytest
import torch
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from peft.utils.hotswap import hotswap_adapter
from support.hub import publish, use_cache
from support.marks import BEFORE_5_17
from support.tiny import tiny, tokens

from rope_patch import export, load_adapter, patch_model
from rope_patch.adapters.sidecar import CONFIG_MARK
from rope_patch.views import Uniform

OTHER_ROPE = "was trained with RoPE .*'yarn'.*, and this model has .* Load it on a separate base model"


def model_of(method):
    """The base model, or one under a method."""
    return patch_model(tiny(), method[0], **method[1]) if method else tiny()


YARN = ("yarn", {"factor": 4.0})
OTHERS = {"rescaled": ("ntk", {"factor": 8.0}), "with a view alone": ("skip", {"skip": Uniform(1, 8)})}


def saved(folder, method=YARN, **kwargs):
    torch.manual_seed(1)
    config = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    model = get_peft_model(model_of(method), config, **kwargs).eval()
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("other", OTHERS)
def test_peft_does_not_load_it_onto_a_model_with_another_rope(other, tmp_path):
    saved(tmp_path)
    base = model_of(OTHERS[other])
    before = base.state_dict()
    with pytest.raises(ValueError, match=OTHER_ROPE):
        PeftModel.from_pretrained(base, tmp_path)
    assert list(base.state_dict()) == list(before), "the model is as it was"


@torch.no_grad()
def test_peft_loads_it_onto_a_model_with_the_same_rope(tmp_path):
    model, ids = saved(tmp_path), tokens(1, 100)
    assert torch.equal(PeftModel.from_pretrained(model_of(YARN), tmp_path)(ids).logits, model(ids).logits)


def test_a_prompt_is_refused_too(tmp_path):
    prompt = PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    get_peft_model(model_of(YARN), prompt).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=OTHER_ROPE):
        PeftModel.from_pretrained(model_of(OTHERS["rescaled"]), tmp_path)


def test_an_adapter_in_a_folder_within_is_refused_too(tmp_path):
    saved(tmp_path, adapter_name="b")
    base = model_of(OTHERS["rescaled"])
    with pytest.raises(ValueError, match=OTHER_ROPE):
        PeftModel.from_pretrained(base, tmp_path, subfolder="b")


@pytest.mark.skipif(BEFORE_5_17, reason="Transformers finds no adapter in a folder within")
def test_transformers_loads_none_in_a_folder_within_either(tmp_path):
    saved(tmp_path, adapter_name="b")
    base = model_of(OTHERS["rescaled"])
    with pytest.raises(ValueError, match=OTHER_ROPE):
        base.load_adapter(tmp_path, adapter_kwargs={"subfolder": "b"})


def test_transformers_does_not_load_it_either(tmp_path):
    saved(tmp_path)
    base = model_of(OTHERS["rescaled"])
    before = list(base.state_dict())
    with pytest.raises(ValueError, match=OTHER_ROPE):
        base.load_adapter(tmp_path)
    assert list(base.state_dict()) == before


def test_weights_of_another_rope_do_not_replace_those_of_an_adapter(tmp_path):
    saved(tmp_path)
    model = saved(tmp_path / "ntk", OTHERS["rescaled"])
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for load in (model.load_adapter, lambda folder, name: hotswap_adapter(model, folder, name)):
        with pytest.raises(ValueError, match=OTHER_ROPE):
            load(tmp_path, "default")
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_one_in_the_cache_of_the_hub_is_refused_too(tmp_path, monkeypatch):
    use_cache(monkeypatch, tmp_path)
    publish(tmp_path, "owner/adapter", main=saved)
    with pytest.raises(ValueError, match=OTHER_ROPE):
        PeftModel.from_pretrained(model_of(OTHERS["rescaled"]), "owner/adapter")


def test_one_on_the_hub_without_specification_is_loaded_with_a_warning(tmp_path, monkeypatch, caplog):
    use_cache(monkeypatch, tmp_path)
    publish(tmp_path, "owner/plain", main=lambda folder: saved(folder, None))
    PeftModel.from_pretrained(model_of(OTHERS["rescaled"]), "owner/plain")
    assert "so its RoPE is not known" in caplog.text


def test_peft_alone_says_what_is_to_be_done_and_load_adapter_says_nothing(tmp_path):
    saved(tmp_path)
    says = "'This adapter needs the RoPE scaling .* load it with rope_patch.load_adapter .* PEFT does not help.'"
    with pytest.warns(UserWarning, match=f"Unexpected keyword arguments .{says}"):
        PeftModel.from_pretrained(tiny(), tmp_path)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Unexpected keyword")
        load_adapter(tiny(), tmp_path)


@pytest.mark.parametrize("method", [None, ("skip", {"skip": Uniform(1, 8)})], ids=["unpatched", "a view of training"])
def test_the_config_of_an_adapter_on_native_rope_is_pefts_own(method, tmp_path):
    saved(tmp_path, method)
    assert CONFIG_MARK not in json.loads((tmp_path / "adapter_config.json").read_text())


def test_an_adapter_whose_specification_was_lost_is_refused(tmp_path):
    """As by a copy of the weights and their config alone."""
    saved(tmp_path / "adapter")
    (tmp_path / "adapter" / "rope_patch.json").unlink()
    lost = "does not exist. By an entry of .*adapter_config.json it was saved with the adapter"
    for load in (
        lambda folder: load_adapter(tiny(), folder),
        lambda folder: PeftModel.from_pretrained(model_of(OTHERS["rescaled"]), folder),
        lambda folder: export(folder, tmp_path / "out"),
    ):
        with pytest.raises(FileNotFoundError, match=lost):
            load(tmp_path / "adapter")
