"""An adapter of a patched model is saved with its RoPE, in whatever order patch, wrapper and adapter came."""

import copy
import json
import pickle

import pytest
import torch
from peft import (
    AdaLoraConfig,
    LoraConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    ShadowConfig,
    VeraConfig,
    get_peft_model,
    get_peft_model_state_dict,
)
from safetensors.torch import load_file
from support.marks import needs_own_adapters
from support.tiny import WINDOW, tiny, tokens

from rope_patch import describe, load_adapter, native_rope, patch_model, rope_view, unpatch_model
from rope_patch.adapters.sidecar import read_sidecar
from rope_patch.views import Compose, Cyclic, Skip, Uniform

LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False, "task_type": "CAUSAL_LM"}
LM = {"task_type": "CAUSAL_LM"}
KINDS = {
    "lora": lambda: LoraConfig(**LORA),
    "vera": lambda: VeraConfig(r=4, target_modules=["q_proj"], init_weights=False, **LM),
    "adalora": lambda: AdaLoraConfig(**{**LORA, "total_step": 10}),
    "prompt": lambda: PromptTuningConfig(num_virtual_tokens=3, **LM),
    "prefix": lambda: PrefixTuningConfig(num_virtual_tokens=3, **LM),
    "p-tuning": lambda: PromptEncoderConfig(num_virtual_tokens=3, encoder_hidden_size=16, **LM),
}
IDS = tokens(2, 24)


def patched(model):
    return patch_model(model, "yarn", factor=2.0)


def logits(model):
    with torch.no_grad():
        return model.eval()(IDS, use_cache=False).logits


def wrapped(model, kind="lora", **options):
    torch.manual_seed(1)
    return get_peft_model(model, KINDS[kind](), **options)


def require_reload(model, folder, right=None):
    """What is saved in `folder` gives the same logits, which are not those of a plain reload."""
    right = logits(model) if right is None else right
    sidecar = json.loads((folder / "rope_patch.json").read_text())
    assert sidecar["rescalings"] == [{"method": "yarn", "options": {"factor": 2.0}}]
    assert sidecar["native_rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}
    assert torch.equal(logits(load_adapter(tiny(), folder)), right)
    assert (logits(PeftModel.from_pretrained(tiny(), folder)) - right).abs().max() > 0.01


ORDERS = ("patch first", "inner model first", "adapter first")


@pytest.mark.parametrize(
    ("kind", "order"),
    [
        *((kind, order) for kind in ("lora", "prompt") for order in ORDERS),
        *((kind, ORDERS[0]) for kind in ("vera", "adalora", "prefix", "p-tuning")),
    ],
)
@pytest.mark.parametrize("forward", [False, True], ids=["saved at once", "after a forward"])
def test_every_kind_in_every_order(kind, order, forward, tmp_path):
    model = tiny()
    if order != "adapter first":
        patched(model if order == "patch first" else model.model)
        model.config = model.model.config  # of which a patch of the inner model makes a new one
    model = wrapped(model, kind)
    if order == "adapter first":
        patched(model)
    if forward:
        logits(model)
    model.save_pretrained(tmp_path)
    require_reload(model, tmp_path)
    assert describe(model).adapters == ("default",)


@pytest.mark.parametrize("safe", [True, False], ids=["safetensors", "bin"])
def test_adapters_that_are_added_and_merged_later(safe, tmp_path):
    model = wrapped(patched(tiny()), adapter_name="one")
    model.add_adapter("two", LoraConfig(**LORA))
    model.add_weighted_adapter(["one", "two"], [0.4, 0.7], "both", combination_type="linear")
    assert describe(model).adapters == ("one", "two", "both")
    model.save_pretrained(tmp_path, safe_serialization=safe)
    for name in ("one", "two", "both"):
        model.set_adapter(name)
        require_reload(model, tmp_path / name)


@pytest.mark.slow
def test_compiled_after_the_wrapping(tmp_path):
    model = wrapped(patched(tiny()))
    compiled = torch.compile(model, backend="eager")
    logits(compiled)
    compiled.save_pretrained(tmp_path / "compiled")
    require_reload(model, tmp_path / "compiled")
    model = torch.compile(patched(tiny()), backend="eager")
    logits(model)
    model = wrapped(model)
    model.save_pretrained(tmp_path / "wrapped", state_dict=model.state_dict())
    assert (tmp_path / "wrapped" / "rope_patch.json").is_file()


def test_compiled_code_may_ask_for_parameters():
    """As forwards of some families do, for their dtype: what looks around at a save is not traced."""
    torch._dynamo.reset()
    model = wrapped(patched(tiny()))
    count = torch.compile(lambda x: x * sum(p.numel() for p in model.parameters()), backend="eager", fullgraph=True)
    assert count(torch.ones(())) == model.num_parameters()


@needs_own_adapters
def test_transformers_own_adapters_before_any_forward(tmp_path):
    model = patched(tiny())
    torch.manual_seed(1)
    model.add_adapter(LoraConfig(**LORA))
    model.save_pretrained(tmp_path)
    require_reload(model, tmp_path)


def test_a_weight_conversion_keeps_both_folders(tmp_path):
    model = get_peft_model(patched(tiny()), LoraConfig(**{**LORA, "init_lora_weights": "pissa"}))
    model.peft_config["default"].init_lora_weights = True
    model.save_pretrained(tmp_path / "initial")
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data += 0.1 * torch.randn_like(parameter)
    right = logits(model)
    model.save_pretrained(tmp_path / "now", path_initial_model_for_weight_conversion=str(tmp_path / "initial"))
    again = load_adapter(tiny(), tmp_path / "now")
    torch.testing.assert_close(logits(again), right, rtol=1e-3, atol=1e-3)
    load_adapter(tiny(), tmp_path / "initial")


@pytest.mark.parametrize(
    "make", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_a_copy_saves_its_own(make, tmp_path):
    model = wrapped(patched(tiny()))
    model.save_pretrained(tmp_path / "first")
    other = make(model)
    assert not {id(m) for m in model.modules()} & {id(m) for m in other.modules()}
    unpatch_model(model)
    other.save_pretrained(tmp_path / "other")
    require_reload(other, tmp_path / "other")
    model.save_pretrained(tmp_path / "model")
    assert not (tmp_path / "model" / "rope_patch.json").exists()


def test_one_config_of_adapters_on_two_models(tmp_path):
    config = LoraConfig(**LORA)
    ours, theirs = get_peft_model(patched(tiny()), config), get_peft_model(tiny(), config)
    ours.save_pretrained(tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs")
    assert not (tmp_path / "theirs" / "rope_patch.json").exists()
    require_reload(ours, tmp_path / "ours")


def test_saving_by_hand(tmp_path):
    model = wrapped(patched(tiny()))
    torch.save(get_peft_model_state_dict(model), tmp_path / "adapter_model.bin")
    model.peft_config["default"].save_pretrained(tmp_path)
    require_reload(model, tmp_path)


@pytest.mark.parametrize(
    "undo", [unpatch_model, lambda m: unpatch_model(m.get_base_model().model)], ids=["all", "inner"]
)
def test_an_unpatched_model_writes_none(undo, tmp_path):
    model = wrapped(patched(tiny()))
    model.save_pretrained(tmp_path / "before")
    undo(model)
    assert "named_modules" not in vars(model.get_base_model().model)
    model.save_pretrained(tmp_path / "after")
    assert not (tmp_path / "after" / "rope_patch.json").exists()
    assert torch.equal(logits(PeftModel.from_pretrained(tiny(), tmp_path / "after")), logits(model))
    model.save_pretrained(tmp_path / "before")  # the weights are those of the sidecar there, which would be taken
    assert not (tmp_path / "before" / "rope_patch.json").exists()


def test_a_specification_of_other_weights_is_refused(tmp_path):
    wrapped(patched(tiny())).save_pretrained(tmp_path)
    torch.manual_seed(2)
    get_peft_model(tiny(), KINDS["lora"]()).save_pretrained(tmp_path)  # without patches: nobody is there to delete it
    with pytest.raises(ValueError, match="does not belong to the weights beside it"):
        load_adapter(model := tiny(), tmp_path)
    assert not describe(model).patched


def edit(folder, change):
    entries = json.loads((folder / "rope_patch.json").read_text())
    change(entries)
    (folder / "rope_patch.json").write_text(json.dumps(entries))


DAMAGE = {
    "a view as rescaling": (lambda f: f.update(rescalings=[{"method": "skip", "options": {}}]), "'skip' is a view"),
    "no options": (lambda f: f["rescalings"][0].pop("options"), r"an object as rescalings\[0\].options, got None"),
    "an option out of range": (lambda f: f["rescalings"][0].update(options={"factor": "two"}), "factor .* must be"),
    "another format": (lambda f: f.update(format=99), "must have format 1, got 99"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_specification_is_refused(damage, tmp_path):
    change, message = DAMAGE[damage]
    patch_model(wrapped(patched(tiny())), "skip").save_pretrained(tmp_path)
    edit(tmp_path, change)
    with pytest.raises(ValueError, match=message) as caught:
        load_adapter(model := tiny(), tmp_path)
    assert "rope_patch.json" in str(caught.value) and not describe(model).patched


@pytest.mark.parametrize(
    "view", [Skip(split=5, skip=40), Compose([Skip(skip=Uniform(1, 30)), Cyclic(shift=4)])], ids=["skip", "two"]
)
def test_a_view_that_changes_inference_is_put_on_again(view, tmp_path):
    model = patch_model(wrapped(patched(tiny())), view, seed=3, when="always")
    model.save_pretrained(tmp_path)
    again = load_adapter(tiny(), tmp_path)
    assert torch.equal(logits(again), logits(model))
    assert describe(again).when == "always" and describe(again).view == repr(view)
    edit(tmp_path, lambda entries: entries["view"].pop("options"))  # as before it was recorded
    with pytest.raises(ValueError, match="the options of that view are not recorded"):
        load_adapter(tiny(), tmp_path)


@needs_own_adapters
def test_names_do_not_count_among_weights(tmp_path):
    """Transformers and PEFT write the same adapter under other names."""
    model = wrapped(patched(tiny()))
    model.save_pretrained(tmp_path / "peft")
    other = tiny()
    other.load_adapter(str(tmp_path / "peft"))
    patched(other).save_pretrained(tmp_path / "transformers")
    files = [tmp_path / name / "adapter_model.safetensors" for name in ("peft", "transformers")]
    first, second = map(load_file, files)
    assert sorted(t.sum().item() for t in first.values()) == sorted(t.sum().item() for t in second.values())
    require_reload(other, tmp_path / "transformers")


@pytest.mark.parametrize(("kind", "compiled"), [("lora", False), ("lora", True), ("prompt", False)])
def test_adapters_that_came_later_and_weights_that_were_gathered_elsewhere(kind, compiled, tmp_path):
    """As under DeepSpeed ZeRO-3: nobody asks for the state of the model, and its forwards may be compiled."""
    torch._dynamo.reset()
    model = wrapped(patched(tiny(num_hidden_layers=1 if compiled else 3)), kind)
    right = logits(torch.compile(model, backend="eager") if compiled else model)
    gathered = {name: p.detach() for name, p in model.named_parameters()}
    if kind == "prompt":
        gathered = {name: p.detach() for name, p in model.prompt_encoder.named_parameters(prefix="prompt_encoder")}
    model.save_pretrained(tmp_path, state_dict=gathered)
    assert (tmp_path / "rope_patch.json").is_file()
    if kind == "lora" and not compiled:
        require_reload(model, tmp_path, right)


def wrapped_after_the_patch(kind):
    return wrapped(patched(tiny()), kind)


def wrapped_after_a_forward(kind):
    model = patched(tiny())
    logits(model)
    return wrapped(model, kind)


def patched_inside_its_wrapper(kind):
    model = wrapped(tiny(), kind)
    patched(model.get_base_model())
    return model


def decoder_patched_inside_its_wrapper(kind):
    model = wrapped(tiny(), kind)
    patched(model.get_base_model().model)
    return model


WRAPPINGS = (
    wrapped_after_the_patch, wrapped_after_a_forward, patched_inside_its_wrapper, decoder_patched_inside_its_wrapper
)  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "order"),
    [(kind, order) for kind in ("lora", "prompt") for order in WRAPPINGS] + [("adalora", wrapped_after_the_patch)],
)
def test_weights_that_were_gathered_elsewhere_before_any_forward(kind, order, tmp_path):
    model = order(kind)
    weights = wrapped(tiny(), kind).state_dict()  # equal ones, which nobody has asked this model for
    model.save_pretrained(tmp_path, state_dict=weights)
    require_reload(model, tmp_path)


def test_a_whole_model_around_a_patched_one_with_weights_that_were_gathered_elsewhere(tmp_path):
    """Its config was replaced, and would be saved with the RoPE parameters of another model."""
    model = tiny()
    patched(model.model)
    model.config = tiny().config
    weights = {name: p.detach() for name, p in model.named_parameters()}
    with pytest.raises(ValueError, match="the saved model would be another one"):
        model.save_pretrained(tmp_path, state_dict=weights)


@needs_own_adapters
def test_transformers_own_adapters_with_weights_that_were_gathered_elsewhere(tmp_path):
    model = patched(tiny())
    torch.manual_seed(1)
    model.add_adapter(LoraConfig(**LORA))
    model.save_pretrained(tmp_path, state_dict={name: p.detach() for name, p in model.named_parameters()})
    require_reload(model, tmp_path)


def shadowed(model):
    torch.manual_seed(1)
    return get_peft_model(model, ShadowConfig(task_type="CAUSAL_LM", init_weights=False, shadow_dropout=0.0)).eval()


@torch.no_grad()
def test_an_adapter_with_a_decoder_of_its_own_keeps_a_rescaling_that_came_first(tmp_path):
    model = shadowed(patch_model(tiny(), "yarn", factor=2.0))
    expected = model(IDS).logits
    model.save_pretrained(tmp_path)
    loaded = load_adapter(tiny(), tmp_path)
    assert torch.equal(loaded(IDS).logits, expected)
    loaded.save_pretrained(tmp_path / "again")
    assert torch.equal(load_adapter(tiny(), tmp_path / "again")(IDS).logits, expected)


def test_an_adapter_with_a_decoder_of_its_own_takes_no_later_patch_and_no_view(tmp_path):
    model = shadowed(tiny())
    for call in (lambda: patch_model(model, "yarn", factor=2.0), lambda: rope_view(model, "skip").__enter__()):
        with pytest.raises(ValueError, match=r"PEFT's Shadow has.*patch_model\(base, \.\.\.\) before get_peft_model"):
            call()
    rescaled = shadowed(patch_model(tiny(), "yarn", factor=2.0))
    base, expected = rescaled.get_base_model(), logits(rescaled)
    for call in (
        lambda: patch_model(base, "pi", factor=2.0),
        lambda: patch_model(base, "skip"),
        lambda: unpatch_model(base),
        lambda: rope_view(base, "skip").__enter__(),
    ):
        with pytest.raises(ValueError, match=r"adapter 'default' is PEFT's Shadow.*unpatch it after model.unload"):
            call()
        assert torch.equal(logits(rescaled), expected)
    assert torch.equal(logits(unpatch_model(rescaled.unload())), logits(tiny()))
    viewed = shadowed(patch_model(tiny(), "skip"))
    with pytest.raises(ValueError, match="A view does not go with such an adapter"):
        viewed.save_pretrained(tmp_path)
    unpatch_model(viewed.get_base_model())
    viewed.save_pretrained(tmp_path)


def test_a_block_of_native_rope_leaves_what_is_recorded(tmp_path):
    model = patch_model(get_peft_model(tiny(), LoraConfig(r=2, target_modules=["q_proj"])), "yarn", factor=4.0)
    model.save_pretrained(tmp_path / "outside")
    with native_rope(model):
        model.save_pretrained(tmp_path / "inside")
    outside, inside = (read_sidecar(tmp_path / name) for name in ("outside", "inside"))
    assert outside == inside and inside["max_position_embeddings"] == 4 * WINDOW
