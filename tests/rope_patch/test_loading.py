"""A rescaling on top of a loaded adapter's: what the merged checkpoint gives under it."""

import copy
import json

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from support.tiny import WINDOW, tiny, tokens
from transformers import AutoModelForCausalLM

from rope_patch import describe, export, load_adapter, native_rope, patch_model, unpatch_model
from trl_ext.cli.model_spec import ModelSpec

STACKS = {
    "abf, yarn": (("abf", {"theta": 1e6}), ("yarn", {"factor": 2.0})),
    "abf with a window, pi": (("abf", {"theta": 1e6, "max_position_embeddings": 96}), ("pi", {"factor": 2.0})),
    "yarn, abf": (("yarn", {"factor": 2.0}), ("abf", {"theta": 1e6})),
}


def trained(folder, method, options):
    """An adapter in folder / "adapter", of weights that count; the base and the merged model beside it."""
    tiny().save_pretrained(folder / "base")
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    torch.manual_seed(1)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    model = patch_model(get_peft_model(base, config), method, **options).eval()
    model.save_pretrained(folder / "adapter")
    model.merge_and_unload().save_pretrained(folder / "merged")
    return folder / "adapter"


def fresh(folder, name="base"):
    return AutoModelForCausalLM.from_pretrained(folder / name)


@pytest.mark.parametrize("stack", STACKS)
@torch.no_grad()
def test_it_gives_what_the_merged_checkpoint_gives(stack, tmp_path):
    (first, of_first), (second, of_second) = STACKS[stack]
    adapter = trained(tmp_path, first, of_first)
    merged = patch_model(fresh(tmp_path, "merged"), second, **of_second)
    model = load_adapter(fresh(tmp_path), adapter)
    described, alone = describe(model), model(ids := tokens(2, WINDOW + 20)).logits
    assert patch_model(model, second, **of_second) is model
    assert model.config.rope_parameters == merged.config.rope_parameters
    assert model.config.max_position_embeddings == merged.config.max_position_embeddings
    rotary, right = model.base_model.model.model.rotary_emb, merged.model.rotary_emb
    assert torch.equal(rotary.inv_freq, right.inv_freq) and rotary.attention_scaling == right.attention_scaling
    torch.testing.assert_close(model(ids).logits, merged(ids).logits, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(model(ids).logits, alone, atol=1e-2)
    assert describe(model).rescaling.startswith(f"{described.rescaling}, then {second} ("), "describe tells both"
    assert describe(model).trained_window == WINDOW


@torch.no_grad()
def test_the_next_one_replaces_the_one_on_top_and_undo_goes_to_the_base(tmp_path):
    adapter = trained(tmp_path, "abf", {"theta": 1e6})
    base = fresh(tmp_path)
    bits, ids = base.model.rotary_emb.inv_freq.clone(), tokens(2, 40)
    plain = PeftModel.from_pretrained(fresh(tmp_path), adapter)(ids).logits
    model = load_adapter(base, adapter)
    patch_model(patch_model(model, "pi", factor=2.0), "yarn", factor=2.0)
    assert describe(model).rescaling == "abf (theta 1000000.0), then yarn (factor 2.0)"
    with native_rope(model):
        assert torch.equal(base.model.rotary_emb.inv_freq, bits)
        assert torch.equal(model(ids).logits, plain)
    unpatch_model(model)
    assert torch.equal(base.model.rotary_emb.inv_freq, bits) and torch.equal(model(ids).logits, plain)
    assert base.config.rope_parameters == tiny().config.rope_parameters
    assert base.config.max_position_embeddings == WINDOW and not describe(model).patched


@torch.no_grad()
def test_a_saved_stack_is_restored(tmp_path):
    adapter = trained(tmp_path, "abf", {"theta": 1e6})
    model = patch_model(load_adapter(fresh(tmp_path), adapter), "yarn", factor=2.0)
    model.save_pretrained(tmp_path / "again")  # before any forward
    ids = tokens(2, 40)
    logits = model(ids).logits
    again = load_adapter(fresh(tmp_path), tmp_path / "again")
    assert torch.equal(again(ids).logits, logits)
    assert describe(again).rescaling == describe(model).rescaling
    with pytest.raises(ValueError, match="'yarn' starts from RoPE parameters of type default"):
        patch_model(again, "yarn", factor=2.0)
    assert torch.equal(again(ids).logits, logits), "as it was"


def test_what_one_schedule_cannot_express_is_refused(tmp_path):
    adapter = trained(tmp_path, "yarn", {"factor": 2.0})
    model = load_adapter(fresh(tmp_path), adapter)
    before = describe(model)
    with pytest.raises(ValueError, match="starts from RoPE parameters of type .*which would be lost"):
        patch_model(model, "yarn", factor=2.0)
    with pytest.raises(ValueError, match="starts from RoPE parameters of type .*which would be lost"):
        patch_model(model, "pi", factor=2.0)
    assert describe(model) == before


@torch.no_grad()
def test_the_command_line_stacks_too(tmp_path):
    adapter = trained(tmp_path, "abf", {"theta": 1e6})
    model = ModelSpec.parse(f"{adapter}@yarn:factor=2").load("cpu", torch.float32)
    merged = patch_model(fresh(tmp_path, "merged"), "yarn", factor=2.0)
    ids = tokens(2, 40)
    torch.testing.assert_close(model(ids).logits, merged(ids).logits, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="records the RoPE that the adapter was trained with. Leave @native out"):
        ModelSpec.parse(f"{adapter}@native").check()


def test_a_rescaling_that_makes_another_model_than_in_training_is_refused(tmp_path):
    native = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 16}
    native |= {"long_factor": [1.0, 2.0, 3.0, 4.0], "short_factor": [1.0] * 4}
    tiny(rope_parameters=native).save_pretrained(tmp_path / "base")
    config = LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    options = {"theta": 1e6, "max_position_embeddings": 128}
    patch_model(get_peft_model(fresh(tmp_path), config), "abf", **options).save_pretrained(tmp_path / "adapter")
    load_adapter(fresh(tmp_path), tmp_path / "adapter")
    file = tmp_path / "adapter" / "rope_patch.json"
    recorded = json.loads(file.read_text())
    assert recorded["rope_parameters"].pop("factor") == WINDOW / 16  # as earlier versions did: the window made it 8
    file.write_text(json.dumps(recorded))
    base = fresh(tmp_path)
    with pytest.raises(ValueError, match="now gives .* which is another model. Load it with the version that trained"):
        load_adapter(base, tmp_path / "adapter")
    assert base.config.max_position_embeddings == WINDOW and base.config.rope_parameters["rope_theta"] == 10000.0


@torch.no_grad()
def test_a_second_adapter_of_another_rope_is_refused(tmp_path, caplog):
    first = trained(tmp_path, "yarn", {"factor": 4.0})
    config = LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    of_ntk = patch_model(get_peft_model(fresh(tmp_path), config), "ntk", factor=8.0).eval()
    of_ntk.save_pretrained(tmp_path / "ntk")
    get_peft_model(fresh(tmp_path), config).save_pretrained(tmp_path / "unknown")
    model, ids = load_adapter(fresh(tmp_path), first), tokens(1, 100)
    for copied in (model, copy.deepcopy(model)):
        with pytest.raises(ValueError, match="'default'}, and this model has .*'yarn'.* all of its adapters share"):
            copied.load_adapter(tmp_path / "ntk", "other")
        assert list(copied.peft_config) == ["default"]
    model.load_adapter(first, "again")
    model.load_adapter(tmp_path / "unknown", "unknown")
    assert "so its RoPE is not known" in caplog.text
    patch_model(unpatch_model(model), "ntk", factor=8.0)
    model.load_adapter(tmp_path / "ntk", "other")
    model.set_adapter("other")
    assert torch.equal(model.eval()(ids).logits, of_ntk(ids).logits)
    unpatch_model(model)
    assert "load_adapter" not in vars(model)


@torch.no_grad()
def test_an_adapter_with_a_name_of_its_own_is_in_a_folder_within(tmp_path):
    tiny().save_pretrained(tmp_path / "base")
    config = LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    model = patch_model(get_peft_model(fresh(tmp_path), config, adapter_name="b"), "yarn", factor=4.0).eval()
    model.save_pretrained(tmp_path / "adapters")
    ids = tokens(1, 100)
    again = load_adapter(fresh(tmp_path), tmp_path / "adapters", subfolder="b")
    assert torch.equal(again(ids).logits, model(ids).logits)
    with pytest.raises(FileNotFoundError, match="holds adapters by name, each in its own folder: b. Name the folder"):
        load_adapter(fresh(tmp_path), tmp_path / "adapters")
    with pytest.raises(FileNotFoundError, match="holds adapters by name, each in its own folder: b. Name the folder"):
        export(tmp_path / "adapters", tmp_path / "out")


def test_a_folder_without_weights_leaves_the_rope_of_the_base(tmp_path):
    adapter = trained(tmp_path, "abf", {"theta": 1e6})
    (adapter / "adapter_model.safetensors").unlink()
    base = fresh(tmp_path)
    with pytest.raises(Exception, match="adapter"):
        load_adapter(base, adapter)
    assert not describe(base).patched and base.config.rope_parameters == tiny().config.rope_parameters


@torch.no_grad()
def test_what_an_adapter_was_merged_into_is_not_saved_beside_it(tmp_path):
    """From such a folder Transformers loads the merged weights with the adapter on them."""
    adapter = trained(tmp_path, "yarn", {"factor": 4.0})
    merged = load_adapter(fresh(tmp_path), adapter).merge_and_unload()
    before = sorted(adapter.iterdir())
    for options in ({}, {"state_dict": dict(merged.named_parameters())}):
        with pytest.raises(ValueError, match="has an adapter, which Transformers would apply to this model's weights"):
            merged.save_pretrained(adapter, **options)
    assert sorted(adapter.iterdir()) == before
    merged.save_pretrained(tmp_path / "elsewhere")
    ids = tokens(1, 100)
    assert torch.equal(fresh(tmp_path, "elsewhere")(ids).logits, merged(ids).logits)
    load_adapter(fresh(tmp_path), adapter).save_pretrained(adapter)
