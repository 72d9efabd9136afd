"""config.json says RoPE in both forms, so that readers of the older one meet the same model."""

import json

import pytest
import torch
from support.older_transformers import VERSION, run_with_older_transformers
from support.tiny import WINDOW, gemma3, tiny, tokens
from transformers import AutoConfig, AutoModelForCausalLM, Phi3Config, Phi3ForCausalLM, PreTrainedConfig

from rope_patch import load_adapter, patch_model, unpatch_model
from rope_patch.rope.older_form import older_form
from rope_patch.views import Uniform

OLDER = {"rope_theta", "rope_scaling", "rope_local_base_freq"}
RESCALINGS = {
    "pi": {"factor": 4.0},
    "ntk": {"factor": 4.0},
    "abf": {"theta": 5e5, "max_position_embeddings": 4 * WINDOW},
    "yarn": {"factor": 4.0},
    "yarn-options": {"factor": 4.0, "beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.0, "truncate": False},
    "yarn-mscale": {"factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.5},
    "llama3": {"factor": 4.0},
    "longrope": {"factor": 4.0, "long_factor": [1.0, 1.5, 3.0, 4.0]},
    "dynamic-ntk": {"factor": 4.0},
}
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma3", "phi3")
OF_PHI3 = ("ntk", "abf", "longrope")  # Transformers takes no other for it
CELLS = [
    *(("llama", rescaling) for rescaling in RESCALINGS),
    *(
        ("gemma3", rescaling) for rescaling in RESCALINGS if rescaling != "yarn-options"
    ),  # which takes no truncate=False
    *(("phi3", rescaling) for rescaling in OF_PHI3),
    *zip(("qwen2", "qwen3", "mistral"), ("pi", "yarn", "llama3"), strict=True),
]


def made(family, partial=1.0):
    if family == "gemma3":
        return gemma3()
    if family == "phi3":
        torch.manual_seed(0)
        config = Phi3Config(
            vocab_size=101, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=WINDOW, original_max_position_embeddings=WINDOW, initializer_range=0.2,
            pad_token_id=0, bos_token_id=1, eos_token_id=2, partial_rotary_factor=partial,
        )  # fmt: skip
        return Phi3ForCausalLM(config).eval()
    return tiny(family)


def rescaled(family, rescaling):
    return patch_model(made(family), rescaling.split("-o")[0].split("-m")[0], **RESCALINGS[rescaling])


def saved(model, folder):
    model.save_pretrained(folder)
    return json.loads((folder / "config.json").read_text())


def saved_in_both_forms(model, folder):
    """As `export` writes them."""
    written = {**saved(model, folder), **older_form(model.config)}
    (folder / "config.json").write_text(json.dumps(written))
    return written


@pytest.mark.parametrize(("family", "rescaling"), CELLS)
@torch.no_grad()
def test_both_forms_and_the_older_one_alone_give_the_same_bits(family, rescaling, tmp_path):
    model, ids = rescaled(family, rescaling), tokens(1, WINDOW + 30)
    written = saved_in_both_forms(model, tmp_path)
    assert "rope_parameters" in written and "rope_theta" in written
    assert ("rope_scaling" in written) == (rescaling not in ("ntk", "abf"))
    assert ("rope_local_base_freq" in written) == (family == "gemma3")
    logits = model(ids).logits
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path).eval()(ids).logits, logits)
    del written["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(written))
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path).eval()(ids).logits, logits)


@pytest.mark.parametrize(("family", "rescaling"), CELLS)
def test_save_pretrained_writes_what_a_training_can_go_on_from(family, rescaling, tmp_path):
    """Transformers' Trainer reads a checkpoint's config as one of no family."""
    written = saved(rescaled(family, rescaling), tmp_path)
    PreTrainedConfig.from_json_file(tmp_path / "config.json")
    names_the_window = rescaling.startswith(("yarn", "llama3", "longrope"))
    assert ("rope_theta" in written) == (not names_the_window) and "rope_parameters" in written


@pytest.mark.parametrize("family", FAMILIES)
def test_without_a_patch_config_is_as_transformers_writes_it(family, tmp_path):
    stock = saved(made(family), tmp_path / "stock")
    model = patch_model(made(family), "skip", skip=Uniform(1, 8))
    assert saved(model, tmp_path / "view") == stock
    patch_model(model, "ntk", factor=2.0)
    assert saved(model, tmp_path / "rescaled").keys() & OLDER
    assert saved(unpatch_model(model), tmp_path / "unpatched") == stock


def test_another_rescaling_leaves_no_key_of_the_one_before(tmp_path):
    model = patch_model(tiny(), "yarn", factor=4.0)
    patch_model(model, "abf", theta=5e5)
    written = saved(model, tmp_path)
    assert written["rope_theta"] == 5e5 and "rope_scaling" not in written


def test_a_checkpoint_with_both_forms_is_patched_and_unpatched_without_a_trace(tmp_path):
    saved_in_both_forms(patch_model(tiny(), "yarn", factor=4.0), tmp_path / "yarn")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "yarn")
    stock = saved(loaded, tmp_path / "stock")
    assert not stock.keys() & OLDER
    patch_model(loaded, "abf", theta=5e5)
    again = saved(loaded, tmp_path / "abf")
    assert again["rope_parameters"]["rope_theta"] == 5e5 and again["rope_parameters"]["rope_type"] == "yarn"
    assert not again.keys() & OLDER
    assert saved(unpatch_model(loaded), tmp_path / "unpatched") == stock


def test_the_window_that_longrope_names_does_not_outlive_it(tmp_path):
    saved_in_both_forms(rescaled("llama", "longrope"), tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    patch_model(loaded, "yarn", factor=8.0, original_max_position_embeddings=2 * WINDOW)
    assert loaded.config.rope_parameters["original_max_position_embeddings"] == 2 * WINDOW
    assert "original_max_position_embeddings" not in saved(loaded, tmp_path / "yarn")


def test_an_adapter_that_is_merged_writes_both_and_one_that_is_taken_off_neither(tmp_path):
    peft = pytest.importorskip("peft")
    stock = saved(tiny(), tmp_path / "stock")
    lora = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(patch_model(tiny(), "pi", factor=4.0), lora)
    adapted.save_pretrained(tmp_path / "adapter")
    written = saved(load_adapter(tiny(), tmp_path / "adapter").merge_and_unload(), tmp_path / "merged")
    assert written["rope_scaling"]["rope_type"] == written["rope_parameters"]["rope_type"] == "linear"
    base = unpatch_model(load_adapter(tiny(), tmp_path / "adapter")).unload()
    assert saved(base, tmp_path / "native") == stock


def test_a_family_that_reads_the_older_form_otherwise_still_loads_to_the_same_bits(tmp_path):
    from transformers import Olmo3Config, Olmo3ForCausalLM

    config = Olmo3Config(
        vocab_size=101, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=WINDOW, layer_types=["sliding_attention", "full_attention"], sliding_window=8,
        pad_token_id=0,
    )  # fmt: skip
    model, ids = patch_model(Olmo3ForCausalLM(config).eval(), "yarn", factor=4.0), tokens(1, 90)
    saved_in_both_forms(model, tmp_path)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path).eval()(ids).logits, model(ids).logits)


def test_partial_rotary_is_in_the_older_form_too(tmp_path):
    written = saved(patch_model(made("phi3", partial=0.5), "ntk", factor=4.0), tmp_path)
    assert written["partial_rotary_factor"] == written["rope_parameters"]["partial_rotary_factor"] == 0.5
    del written["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(written))
    assert AutoConfig.from_pretrained(tmp_path).rope_parameters["partial_rotary_factor"] == 0.5


_LOGITS = """
import sys
from pathlib import Path
import torch, transformers
assert transformers.__version__ == sys.argv[1], transformers.__version__
for folder in sys.argv[2:]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").eval()
    with torch.no_grad():
        logits = [model(torch.load(Path(folder) / f"{name}.ids")).logits for name in ("short", "long")]
    for name, values in zip(("short", "long"), logits):
        torch.save(values, Path(folder) / f"{name}.logits")
"""


@pytest.mark.slow
@torch.no_grad()
def test_older_transformers_reads_the_same_model(tmp_path):
    folders, models = {}, {}
    for family, rescaling in CELLS:
        folder, model = tmp_path / f"{family}-{rescaling}", rescaled(family, rescaling)
        saved_in_both_forms(model, folder)
        # dynamic RoPE types differ by the longest row so far: short rows first, as in the other process
        for name, length in (("short", WINDOW - 10), ("long", WINDOW + 40)):
            torch.save(tokens(1, length), folder / f"{name}.ids")
        folders[family, rescaling], models[family, rescaling] = folder, model
    run_with_older_transformers(_LOGITS, VERSION, *map(str, folders.values()))
    apart = {}
    for cell, folder in folders.items():
        for name in ("short", "long"):
            here = models[cell](torch.load(folder / f"{name}.ids")).logits
            there = torch.load(folder / f"{name}.logits")
            apart[cell, name] = float((here - there).abs().max() / here.std())
    # two versions of one attention differ in the order of float32 sums; other RoPE parameters differ by more than 0.1
    assert {cell: value for cell, value in apart.items() if value > 1e-4} == {}
