"""`export`: a folder that another program serves right, or a refusal that says why not."""

import json
import math
import pickle
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.characters import character_tokenizer
from support.families import tiny_family
from support.launched import run_python
from support.tiny import WINDOW, gemma3, tiny, tokens
from transformers import AutoModelForCausalLM, AutoTokenizer, Phi3Config, Phi3ForCausalLM

import rope_patch
from rope_patch import load_adapter, patch_model, rope_view, unpatch_model
from rope_patch.checkpoints import tokenizer_window
from rope_patch.export import writing
from rope_patch.export.gguf import convert, require_runs
from rope_patch.export.outcomes import OUTCOMES
from rope_patch.views import Uniform
from trl_ext.cli.model_spec import ModelSpec

LONG = [1.0, 1.5, 3.0, 4.0]
A = 1.7


def made(family):
    other = {"gemma3_text": gemma3, "phi3": phi3}
    return other[family]() if family in other else tiny(family)


def phi3(**options):
    shape = dict(
        vocab_size=101, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=WINDOW, original_max_position_embeddings=WINDOW, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, initializer_range=0.2,
    )  # fmt: skip
    return Phi3ForCausalLM(Phi3Config(**{**shape, **options})).eval()


def reloaded(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()


def export(model, folder, **options):
    """Without another process, which takes seconds, where a test compares logits itself."""
    return rope_patch.export(model, folder, **{"check": False, **options})


def lora(model, **options):
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    options = {"target_modules": ["q_proj", "down_proj"], "init_lora_weights": False, **options}
    return peft.get_peft_model(model, peft.LoraConfig(**options)).eval()


def left_behind(folder):
    return [path.name for path in folder.iterdir()]


@pytest.mark.slow
@torch.no_grad()
def test_the_result_is_checked_in_a_process_without_this_package(tmp_path):
    model = patch_model(tiny(), "yarn", factor=4.0)
    done = rope_patch.export(model, tmp_path / "out", target="vllm")
    assert done.difference is not None and done.difference < 1e-4
    assert done.command == f"vllm serve {tmp_path / 'out'} --max-model-len {4 * WINDOW}"
    assert str(tmp_path) in str(done) and "logits differ by" in str(done)
    ids = tokens(1, 100)
    assert torch.equal(reloaded(tmp_path / "out")(ids).logits, model(ids).logits)


@pytest.mark.slow
def test_a_result_that_is_another_model_is_not_left_behind(tmp_path, monkeypatch):
    from rope_patch.export import exporting

    def other(causal_lm, *_):
        return ((name, 2 * weight) for name, weight in causal_lm.state_dict().items())

    monkeypatch.setattr(exporting, "final_weights", other)
    with pytest.raises(RuntimeError, match="another model"):
        rope_patch.export(tiny(), tmp_path / "out")
    assert left_behind(tmp_path) == []


def test_a_model_that_computes_no_finite_logits_is_refused(tmp_path):
    model = tiny()
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match="own logits .* are not finite: .* overflow in torch.float32.*--no-check"):
        export(model, tmp_path / "out", check=True)
    assert left_behind(tmp_path) == []
    with pytest.raises(
        ValueError, match=r"model.layers.0.mlp.down_proj.weight has NaN values: the training has diverged"
    ):
        export(model, tmp_path / "out", check=False)
    assert left_behind(tmp_path) == []


def test_a_model_that_nobody_rescaled_gets_both_forms_too(tmp_path):
    export(tiny(), tmp_path / "out", target="mlx")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 10000.0


@pytest.mark.parametrize(
    ("family", "target"), [("llama", "sglang"), ("qwen2", "mlx"), ("qwen3", "sglang"), ("gemma3_text", "mlx")]
)
@torch.no_grad()
def test_an_attention_factor_is_folded_into_queries(family, target, tmp_path):
    model = patch_model(made(family), "yarn", factor=4.0, attention_factor=A)
    ids = tokens(1, 100)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    done = export(model, tmp_path / "out", target=target)
    assert done.folded
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "attention_factor" not in json.dumps(config)
    expected = model(ids).logits
    torch.testing.assert_close(reloaded(tmp_path / "out")(ids).logits, expected, rtol=1e-4, atol=1e-4)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    plain = patch_model(made(family), "yarn", factor=4.0)
    assert (plain(ids).logits - expected).abs().max() > 1e-2  # what the program would have made of it


@torch.no_grad()
def test_an_attention_factor_that_is_the_default_is_left_as_it_is(tmp_path):
    model = patch_model(tiny(), "yarn", factor=4.0, attention_factor=0.1 * math.log(4.0) + 1)
    done = export(model, tmp_path / "out", target="sglang")
    ids = tokens(1, 100)
    assert not done.folded and torch.equal(reloaded(tmp_path / "out")(ids).logits, model(ids).logits)


@torch.no_grad()
def test_mscale_is_folded_for_llama_cpp(tmp_path):
    model = patch_model(tiny("qwen2"), "yarn", factor=4.0, mscale=1.0, mscale_all_dim=0.3)
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "tokenizer.json").write_text("{}")
    model.config._name_or_path = str(tmp_path / "source")
    export(model, tmp_path / "out", target="llama.cpp", converter=fake_converter(tmp_path))
    ids = tokens(1, 100)
    assert "mscale" not in (tmp_path / "out" / "config.json").read_text()
    torch.testing.assert_close(reloaded(tmp_path / "out")(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_phi3_has_queries_keys_and_values_in_one_projection(tmp_path):
    model = phi3()
    patch_model(model, "longrope", factor=4.0, long_factor=LONG, attention_factor=A)
    export(model, tmp_path / "out", target="sglang")
    ids = tokens(1, 100)
    torch.testing.assert_close(reloaded(tmp_path / "out")(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)

    partial = phi3(partial_rotary_factor=0.5)
    patch_model(partial, "longrope", factor=4.0, long_factor=LONG[:2], attention_factor=A)
    with pytest.raises(ValueError, match="4 of 8 features are rotated"):
        export(partial, tmp_path / "partial", target="sglang")


@pytest.mark.parametrize("family", ["phi3", "llama"])
@torch.no_grad()
def test_a_smaller_window_keeps_the_attention_factor_that_the_window_made(tmp_path, family):
    """Transformers takes the factor of LongRoPE from the config's window where none is named, as in Phi-3-128k."""
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": LONG}
    if family == "phi3":
        model = phi3(max_position_embeddings=4 * WINDOW, rope_parameters=rope)
    else:
        rope["original_max_position_embeddings"] = WINDOW
        model = tiny(family, max_position_embeddings=4 * WINDOW, rope_parameters=rope)
    export(model, tmp_path / "out", window=2 * WINDOW)
    assert "factor" not in model.config.rope_parameters
    exported = reloaded(tmp_path / "out")
    assert exported.config.max_position_embeddings == 2 * WINDOW
    for n in (20, 100):
        ids = tokens(1, n)
        assert torch.equal(exported(ids, use_cache=False).logits, model(ids, use_cache=False).logits)


def programs_table(config, n):
    """Cosines and sines [n, d] of LongRoPE as vLLM, SGLang and mlx-lm compute them, here in float64.

    Attention factors and `factor` they do not read: theirs is that of max_position_embeddings / L0, from 1 on.
    """
    rope = config.rope_parameters
    origin = rope["original_max_position_embeddings"]
    divisors = torch.tensor(rope["long_factor"], dtype=torch.float64)
    d = 2 * len(divisors)
    frequencies = rope["rope_theta"] ** (-torch.arange(0, d, 2, dtype=torch.float64) / d) / divisors
    angles = (torch.arange(n, dtype=torch.float64)[:, None] * frequencies).repeat(1, 2)
    scale = math.sqrt(1 + math.log(max(1.0, config.max_position_embeddings / origin)) / math.log(origin))
    return angles.cos() * scale, angles.sin() * scale


@pytest.mark.parametrize("target", ["vllm", "sglang", "mlx"])
@pytest.mark.parametrize(
    ("options", "window", "folded"),
    [({}, None, False), ({"attention_factor": A}, None, True), ({}, 2 * WINDOW, True)],
    ids=["equal", "attention factor", "smaller window"],
)
@torch.no_grad()
def test_longrope_with_equal_factors_is_exported_as_programs_read_it(target, options, window, folded, tmp_path):
    model = patch_model(tiny(), "longrope", factor=4.0, long_factor=LONG, short_factor=LONG, **options)
    done = export(model, tmp_path / "out", target=target, window=window)
    assert done.folded == folded
    exported = reloaded(tmp_path / "out")
    assert exported.config.max_position_embeddings == (window or 4 * WINDOW)
    for n in (20, 100):  # within the trained window and beyond it
        ids = tokens(1, n)
        expected = model(ids).logits
        torch.testing.assert_close(exported(ids).logits, expected, rtol=1e-4, atol=1e-4)
        cos, sin = programs_table(exported.config, n)
        exported.model.rotary_emb.forward = lambda x, position_ids, tables=(cos, sin): tuple(
            table[None].to(x.dtype) for table in tables
        )
        torch.testing.assert_close(exported(ids).logits, expected, rtol=1e-4, atol=1e-4)
        del exported.model.rotary_emb.forward


@pytest.mark.parametrize("target", ["vllm", "sglang", "mlx"])
@pytest.mark.parametrize(("family", "folded"), [("llama", False), ("olmo2", False), ("phi3", True)])
@pytest.mark.parametrize(("window", "served"), [(WINDOW, None), (4 * WINDOW, None), (4 * WINDOW, 2 * WINDOW)])
@torch.no_grad()
def test_frequencies_of_zero_are_exported_as_programs_read_them(target, family, folded, window, served, tmp_path):
    """Programs take no attention factor where the window is L0, which the config of Phi-3 names once more."""
    model = tiny_family(family) if family == "olmo2" else made(family)
    patch_model(model, "cope", n=3, max_position_embeddings=window)
    done = export(model, tmp_path / "out", target=target, window=served)
    assert done.folded == (folded and window > WINDOW)
    exported, ids = reloaded(tmp_path / "out"), tokens(1, 100)
    expected = model(ids, use_cache=False).logits
    torch.testing.assert_close(exported(ids, use_cache=False).logits, expected, rtol=1e-4, atol=1e-4)
    cos, sin = programs_table(exported.config, 100)
    exported.model.rotary_emb.forward = lambda x, position_ids: (cos[None].to(x.dtype), sin[None].to(x.dtype))
    torch.testing.assert_close(exported(ids, use_cache=False).logits, expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_smaller_window_of_longrope_keeps_its_attention_factor_in_sglang(tmp_path):
    """Short and long factors may differ there."""
    model = patch_model(tiny(), "longrope", factor=4.0, long_factor=LONG)
    assert export(model, tmp_path / "out", target="sglang", window=2 * WINDOW).folded
    exported = reloaded(tmp_path / "out")
    cos, sin = programs_table(exported.config, 100)
    exported.model.rotary_emb.forward = lambda x, position_ids: (cos[None].to(x.dtype), sin[None].to(x.dtype))
    ids = tokens(1, 100)
    torch.testing.assert_close(exported(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)


RESCALED = {
    "linear": {"factor": 4.0},
    "yarn": {"factor": 4.0},
    "llama3": {"factor": 4.0},
    "longrope": {"factor": 4.0, "long_factor": LONG},
    "dynamic": {"factor": 4.0},
}
VALUES = {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False}


@pytest.mark.parametrize(
    "cell", [outcome for outcome in OUTCOMES if not outcome.folds], ids=lambda o: f"{o.program}-{o.rope_type}"
)
def test_what_a_program_serves_wrong_is_refused_with_what_to_take_instead(cell, tmp_path):
    method = {"dynamic": "dynamic-ntk", "linear": "pi"}.get(cell.rope_type, cell.rope_type)
    family = (cell.families or [f for f in ("llama", "qwen2") if f not in cell.right_for])[0]
    for option in cell.options or [None]:
        options = {**RESCALED[cell.rope_type], **({} if option is None else {option: VALUES[option]})}
        model = patch_model(made(family), method, **options)
        with pytest.raises(ValueError, match=f"{cell.program} would serve this model wrong") as refusal:
            export(model, tmp_path / "out", target=cell.program, **converter_for(cell.program, tmp_path))
        assert cell.reason in str(refusal.value) and cell.instead in str(refusal.value)
        assert not (tmp_path / "out").exists()


def test_options_that_say_what_is_so_anyway_are_not_refused(tmp_path):
    model = patch_model(tiny(), "yarn", factor=4.0, beta_fast=32.0, truncate=True)
    assert not export(model, tmp_path / "out", target="mlx").folded


def converter_for(program, folder):
    return {"converter": fake_converter(folder)} if program == "llama.cpp" else {}


def fake_converter(folder, code="Path(sys.argv[3]).write_bytes(b'GGUF')"):
    path = folder / "converter" / "convert_hf_to_gguf.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"import sys\nfrom pathlib import Path\n{code}\n")
    return path


@torch.no_grad()
def test_lora_is_merged_and_the_model_stays_as_it_is(tmp_path):
    model = lora(patch_model(tiny(dtype=torch.bfloat16), "yarn", factor=4.0))
    ids = tokens(1, 90)
    before, logits = {n: w.clone() for n, w in model.state_dict().items()}, model(ids).logits
    export(model, tmp_path / "out")
    assert all(torch.equal(w, before[n]) for n, w in model.state_dict().items())
    assert torch.equal(model(ids).logits, logits)
    merged = reloaded(tmp_path / "out")
    assert merged.dtype == torch.bfloat16
    layer = model.base_model.model.model.layers[1].mlp.down_proj
    exact = layer.get_base_layer().weight.float() + layer.get_delta_weight("default").float()
    assert torch.equal(merged.model.layers[1].mlp.down_proj.weight, exact.bfloat16())


@torch.no_grad()
def test_adapters_that_replace_more_than_a_weight_are_refused_and_stay(tmp_path):
    peft = pytest.importorskip("peft")
    config, ids = peft.LNTuningConfig(target_modules=["input_layernorm"]), tokens(1, 20)
    model = peft.get_peft_model(tiny(), config).eval()
    for name, parameter in model.named_parameters():
        if "ln_tuning" in name:
            parameter += 0.3
    before = model(ids).logits
    with pytest.raises(ValueError, match="which is not merged here: call model.merge_and_unload"):
        export(model, tmp_path / "out")
    assert torch.equal(model(ids).logits, before) and not left_behind(tmp_path)


@pytest.mark.parametrize(("named", "expected"), [(64, 256), (100, 256), (50, 50), (1000, 1000)])
def test_the_tokenizer_names_the_new_window_if_it_named_that_of_before(named, expected, tmp_path):
    tokenizer = character_tokenizer()
    tokenizer.model_max_length = named
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    model = patch_model(tiny(), "ntk", factor=8.0)
    export(model, tmp_path / "out", tokenizer=tmp_path / "tokenizer")
    assert AutoTokenizer.from_pretrained(tmp_path / "out").model_max_length == expected
    export(tiny(), tmp_path / "native", tokenizer=tmp_path / "tokenizer")
    assert AutoTokenizer.from_pretrained(tmp_path / "native").model_max_length == named


@pytest.mark.parametrize(
    ("method", "options", "window"),
    [
        ("yarn", {"factor": 4.0}, 256),
        ("longrope", {"factor": 4.0, "long_factor": LONG}, 256),
        ("ntk", {"factor": 8.0}, None),  # its checkpoint does not say the window before
    ],
)
def test_the_tokenizer_beside_a_saved_rescaled_model_names_the_new_window_or_is_said_to_be_short(
    method, options, window, tmp_path, monkeypatch
):
    model = patch_model(tiny(), method, **options)
    model.generation_config.max_length = WINDOW
    model.save_pretrained(tmp_path / "model")
    tokenizer = character_tokenizer()
    tokenizer.model_max_length = WINDOW
    tokenizer.save_pretrained(tmp_path / "model")
    warned = []
    monkeypatch.setattr(tokenizer_window.logger, "warning", warned.append)
    export(tmp_path / "model", tmp_path / "out")
    expected = WINDOW if window is None else window
    assert AutoTokenizer.from_pretrained(tmp_path / "out").model_max_length == expected
    assert reloaded(tmp_path / "out").generation_config.max_length == expected
    said = f"The tokenizer names {WINDOW} positions (model_max_length in tokenizer_config.json) and the config 256: "
    assert [text.startswith(said) for text in warned] == ([] if window else [True])
    export(patch_model(reloaded(tmp_path / "model"), "abf", theta=1e6, max_position_embeddings=512), tmp_path / "more")
    assert AutoTokenizer.from_pretrained(tmp_path / "more").model_max_length == (512 if window else WINDOW)


def test_all_files_of_a_tokenizer_are_copied_whose_own_may_be_read_only(tmp_path):
    tokenizer = character_tokenizer()
    tokenizer.chat_template = {"default": "a", "tool_use": "b"}
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    others = ("tekken.json", "preprocessor_config.json")  # Mistral's own tokenizer; what prepares images
    for name in others:
        (tmp_path / "tokenizer" / name).write_text("{}")
    for file in (tmp_path / "tokenizer").glob("*.json"):
        file.chmod(0o444)
    export(tiny(), tmp_path / "out", tokenizer=tmp_path / "tokenizer")
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == tokenizer.chat_template
    assert all((tmp_path / "out" / name).is_file() for name in others)
    assert all(file.stat().st_mode & 0o200 for file in (tmp_path / "out").iterdir())


@pytest.mark.parametrize(("named", "expected"), [(64, 256), (50, 50), (None, None)])
def test_generate_takes_prompts_up_to_the_new_window(named, expected, tmp_path):
    model = tiny()
    model.generation_config.max_length = named
    export(patch_model(model, "ntk", factor=8.0), tmp_path / "out")
    again = reloaded(tmp_path / "out")
    assert again.generation_config.max_length == expected and model.generation_config.max_length == named
    if named == 64:
        assert again.generate(tokens(1, 100)).shape[1] > 100


def that_has_diverged():
    model = lora(tiny())
    with torch.no_grad():
        model.base_model.model.model.layers[1].mlp.down_proj.lora_A["default"].weight[0, 0] = torch.nan
    return model


def with_a_prompt():
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(tiny(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda: tiny().model, {}, "LlamaModel has none: load the model with AutoModelForCausalLM"),
        (that_has_diverged, {}, "model.layers.1.mlp.down_proj.weight has NaN values"),
        (with_a_prompt, {}, "prompt learning"),
        (tiny, {"target": "vlm"}, "Did you mean 'vllm'"),
        (tiny, {"max_shard_gb": 0}, "max_shard_gb must be a number above 0, got 0"),
    ],
)
def test_what_cannot_be_exported_is_said(make, options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        export(make(), tmp_path / "out", **options)
    assert left_behind(tmp_path) == []


def without_a_weight(folder):
    file = next(folder.glob("*model.safetensors"))
    weights = load_file(file)
    del weights[next(name for name in sorted(weights) if "layers.0.mlp" in name)]
    save_file(weights, file, metadata={"format": "pt"})


def without_a_head(folder):
    tiny().model.save_pretrained(folder)


def with_a_larger_vocabulary(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 120}))


def cut_short(folder):
    file = next(folder.glob("*model.safetensors"))
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


class Code:
    """What runs code where a pickle is loaded as one."""

    def __reduce__(self):
        return (pytest.fail, ("it was run",))


def with_code(folder):
    file = next(folder.glob("*model.safetensors"))
    file.unlink()
    name = "pytorch_model.bin" if file.stem == "model" else f"{file.stem}.bin"
    (folder / name).write_bytes(pickle.dumps({"code": Code()}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            with_code,
            "checkpoint are damaged, or hold code beside tensors, which is not run. Save or download them again",
        ),
        (lambda folder: (folder / "config.json").write_text("[]"), r"config.json must hold an object, got \[\]. Save"),
        (without_a_weight, "checkpoint lack model.layers.0.mlp.down_proj.weight of the Llama.* would get random ones"),
        (with_a_larger_vocabulary, "checkpoint have another shape for lm_head.weight, model.embed_tokens.weight of "),
        (cut_short, "the weights in .*checkpoint cannot be read: .*Save or download them again"),
        (without_a_head, "lack lm_head.weight of the LlamaForCausalLM that its config.json describes"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_checkpoint_that_would_get_random_weights_is_refused(damage, message, tmp_path):
    """Transformers draws what is missing and says so in its log alone."""
    tiny().save_pretrained(tmp_path / "checkpoint")
    damage(tmp_path / "checkpoint")
    with pytest.raises(ValueError, match=message):
        export(tmp_path / "checkpoint", tmp_path / "out")
    with pytest.raises(ValueError, match=message):
        ModelSpec.parse(f"{tmp_path / 'checkpoint'}@ntk:factor=4").load("cpu", "auto")
    assert left_behind(tmp_path) == ["checkpoint"]


def for_a_larger_vocabulary(folder):
    base = AutoModelForCausalLM.from_pretrained(folder.parent / "base")
    base.resize_token_embeddings(120, mean_resizing=False)
    lora(base, modules_to_save=["lm_head"]).save_pretrained(folder, save_embedding_layers=False)


def with_entry(folder, **entries):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **entries}))


def without_weights(folder):
    (folder / "adapter_model.safetensors").unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without_a_weight, "adapter is not whole.*Found missing adapter keys.*layers.0.mlp.down_proj.lora_A"),
        (cut_short, "adapter is not whole.*Error while deserializing"),
        (with_code, "adapter_model.bin is damaged, or holds code beside tensors, which is not run. Save the adapter"),
        (partial(with_entry, r="8"), "adapter_config.json has a wrong entry: '<=' not supported"),
        (partial(with_entry, peft_type="NONE"), "adapter_config.json has a wrong entry: 'NONE'"),
        (partial(with_entry, revision=[]), r"adapter_config.json must hold a text as revision, got \[\]. Copy it"),
        (
            for_a_larger_vocabulary,
            "holds those of lm_head without those of model.embed_tokens.* load that changed model",
        ),
        (without_weights, "adapter holds adapter_config.json and no weights beside it"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_an_adapter_that_is_not_whole_is_refused(damage, message, tmp_path):
    """PEFT draws what is missing, and warns."""
    tiny().save_pretrained(tmp_path / "base")
    lora(AutoModelForCausalLM.from_pretrained(tmp_path / "base")).save_pretrained(tmp_path / "adapter")
    damage(tmp_path / "adapter")
    with pytest.raises((ValueError, FileNotFoundError), match=f"(?s){message}"):
        export(tmp_path / "adapter", tmp_path / "out")
    with pytest.raises((ValueError, FileNotFoundError), match=f"(?s){message}"):
        ModelSpec.parse(f"{tmp_path / 'adapter'}@yarn:factor=2").load("cpu", "auto")
    assert sorted(left_behind(tmp_path)) == ["adapter", "base"]


@torch.no_grad()
def test_an_adapter_in_a_folder_is_merged_with_the_rope_of_its_training(tmp_path):
    tiny().save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model = lora(patch_model(base, "ntk", factor=4.0))
    model.save_pretrained(tmp_path / "adapter")
    export(tmp_path / "adapter", tmp_path / "out", target="vllm")
    ids = tokens(1, 90)
    torch.testing.assert_close(reloaded(tmp_path / "out")(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="llama.cpp needs the tokenizer"):
        export(tmp_path / "adapter", tmp_path / "gguf", target="llama.cpp", converter=fake_converter(tmp_path))
    load_adapter(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter")


@torch.no_grad()
def test_a_tilde_is_the_home_of_the_user_in_every_path(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    tiny().save_pretrained(tmp_path / "base")
    model = lora(patch_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), "ntk", factor=4.0))
    model.save_pretrained(tmp_path / "adapter")
    character_tokenizer().save_pretrained(tmp_path / "tokenizer")
    fake_converter(tmp_path)
    converter = "~/converter/convert_hf_to_gguf.py"
    export("~/adapter", "~/out", target="llama.cpp", converter=converter, tokenizer="~/tokenizer")
    assert "~" not in left_behind(tmp_path)
    ids = tokens(1, 90)
    torch.testing.assert_close(reloaded(tmp_path / "out")(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)
    adapted = load_adapter(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), "~/adapter")
    assert torch.equal(adapted(ids).logits, model(ids).logits)


def quantised(folder, bits, family="llama"):
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    tiny(family, hidden_size=64, intermediate_size=64).save_pretrained(folder / "base")
    how = BitsAndBytesConfig(**{f"load_in_{bits}bit": True})
    return AutoModelForCausalLM.from_pretrained(folder / "base", quantization_config=how, dtype=torch.float32)


@torch.no_grad()
def test_biases_of_lora_on_a_quantised_layer_are_merged(tmp_path):
    model = lora(quantised(tmp_path, 8, "qwen2"), target_modules=["q_proj"], lora_bias=True)
    layer = model.base_model.model.model.layers[1].self_attn.q_proj
    layer.lora_B["default"].bias.normal_()
    export(model, tmp_path / "out")
    expected = layer.base_layer.bias + layer.lora_B["default"].bias * layer.scaling["default"]
    torch.testing.assert_close(reloaded(tmp_path / "out").model.layers[1].self_attn.q_proj.bias.data, expected.data)
    without = lora(quantised(tmp_path, 8), target_modules=["q_proj"], lora_bias=True)
    with pytest.raises(ValueError, match="q_proj has no bias, and adapter 'default' was trained with lora_bias"):
        export(without, tmp_path / "without")


@pytest.mark.parametrize(("kind", "options"), [
    ("LoraConfig", {"use_dora": True}), ("HiraConfig", {"init_weights": False}),
    ("AdaLoraConfig", {"total_step": 10}),
])  # fmt: skip
def test_adapters_on_quantised_layers_that_add_no_matrix_are_refused(kind, options, tmp_path):
    peft = pytest.importorskip("peft")
    config = getattr(peft, kind)(target_modules=["q_proj"], **options)
    with pytest.raises(ValueError, match="q_proj is quantised, and adapter 'default' does more than add a matrix"):
        export(peft.get_peft_model(quantised(tmp_path, 4), config), tmp_path / "out")
    assert left_behind(tmp_path) == ["base"]


@torch.no_grad()
def test_qlora_is_merged_into_the_dequantised_base(tmp_path):
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig
    from transformers.integrations.bitsandbytes import dequantize_bnb_weight

    tiny(hidden_size=64, head_dim=16, intermediate_size=64).save_pretrained(tmp_path / "base")
    how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", quantization_config=how, dtype=torch.float32)
    model = lora(patch_model(base, "yarn", factor=4.0))
    layers = model.base_model.model.model.layers
    layer, other = layers[1].mlp.down_proj, layers[1].mlp.up_proj
    exact = dequantize_bnb_weight(layer.get_base_layer().weight) + layer.get_delta_weight("default")
    exact_other = dequantize_bnb_weight(other.weight)
    export(model, tmp_path / "out")
    model(tokens(1, 90))  # after which weights on a CPU lie in another order
    export(model, tmp_path / "again")
    # and with their scales in bfloat16: 8 bits
    for folder, tolerance in ((tmp_path / "out", 0.0), (tmp_path / "again", 2**-8)):
        merged = reloaded(folder).model.layers[1].mlp
        torch.testing.assert_close(merged.down_proj.weight.data, exact, rtol=0, atol=tolerance)
        torch.testing.assert_close(merged.up_proj.weight.data, exact_other, rtol=0, atol=tolerance)
        assert "quantization_config" not in (folder / "config.json").read_text()


@torch.no_grad()
def test_embeddings_that_an_adapter_made_two_of_are_saved_as_two(tmp_path):
    model = lora(tiny(tie_word_embeddings=True), modules_to_save=["lm_head"])
    model.base_model.model.lm_head.modules_to_save["default"].weight.mul_(1.5)
    export(model, tmp_path / "out")
    ids = tokens(1, 40)
    torch.testing.assert_close(reloaded(tmp_path / "out")(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("state", ["merged", "disabled", "of one weight"])
@torch.no_grad()
def test_a_head_that_the_config_unties_is_saved_where_it_is_the_embeddings_too(state, tmp_path):
    options = {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": state == "of one weight"}
    if state != "of one weight":
        options = {"target_modules": ["lm_head"]}
    model = lora(tiny(tie_word_embeddings=True), **options)
    if state == "merged":
        model.merge_adapter()
    if state == "disabled":
        model.base_model.disable_adapter_layers()
    export(model, tmp_path / "out")
    ids = tokens(1, 40)
    torch.testing.assert_close(reloaded(tmp_path / "out")(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)


def test_adapters_that_are_merged_and_switched_off_are_refused(tmp_path):
    model = lora(tiny())
    model.merge_adapter()
    with model.disable_adapter():
        with pytest.raises(ValueError, match="merged and switched off at once.* call model.unmerge_adapter.. first"):
            export(model, tmp_path / "out")


@torch.no_grad()
def test_weights_that_only_this_model_shares_are_saved_under_each_name(tmp_path):
    model, ids = tiny(), tokens(1, 40)
    model.lm_head.weight = model.model.embed_tokens.weight
    model.model.layers[1].mlp = model.model.layers[0].mlp
    export(model, tmp_path / "out")
    assert torch.equal(reloaded(tmp_path / "out")(ids).logits, model(ids).logits)


@torch.no_grad()
def test_tied_embeddings_are_saved_once(tmp_path):
    from safetensors import safe_open

    model = tiny(tie_word_embeddings=True)
    export(model, tmp_path / "out")
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as saved:
        assert "lm_head.weight" not in saved.keys()  # noqa: SIM118
    ids = tokens(1, 40)
    assert torch.equal(reloaded(tmp_path / "out")(ids).logits, model(ids).logits)


@torch.no_grad()
def test_shards_are_no_larger_than_asked(tmp_path):
    model = tiny()
    export(model, tmp_path / "out", max_shard_gb=2e-5)
    shards = sorted((tmp_path / "out").glob("model-*.safetensors"))
    assert len(shards) > 2 and all(shard.stat().st_size < 2e4 + 4000 for shard in shards)
    ids = tokens(1, 40)
    assert torch.equal(reloaded(tmp_path / "out")(ids).logits, model(ids).logits)
    modes = {file.stat().st_mode for file in (tmp_path / "out").iterdir()}
    assert len(modes) == 1, "whoever may read the config may read the weights"


# peak memory, in MiB, that an export adds to that of the loaded model with adapters, and the size of its weights
MEASURE = """
import sys
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM
from rope_patch import export, patch_model
shape = dict(
    vocab_size=101, hidden_size=512, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=8,
    num_key_value_heads=8,
)
small = LlamaForCausalLM(LlamaConfig(**shape | {"hidden_size": 8, "num_hidden_layers": 1}))
model = LlamaForCausalLM(LlamaConfig(**shape))
patch_model(model, "yarn", factor=2.0, attention_factor=1.3)
model = get_peft_model(model, LoraConfig(target_modules="all-linear", init_lora_weights=False))
export(small, sys.argv[1] + "/first", check=False)  # what is imported and allocated once
# not ru_maxrss, which begins with that of the process that started this one
peak = lambda: next(int(line.split()[1]) / 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
before = peak()
export(model, sys.argv[1] + "/out", target="mlx", check=False, max_shard_gb=float(sys.argv[2]))
print(peak() - before, sum(p.numel() for p in model.parameters()) * 4 / 2**20)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_merging_takes_a_shard_and_a_layer_of_memory_not_another_model(tmp_path):
    pytest.importorskip("peft")
    added = {}
    for shard_gb in (0.02, 5.0):
        folder = tmp_path / str(shard_gb)
        folder.mkdir()
        done = run_python("-c", MEASURE, str(folder), str(shard_gb))
        done.check_returncode()
        added[shard_gb], weights = map(float, done.stdout.split())
    assert added[0.02] < weights / 2, added
    assert added[5.0] > weights / 2, "in one shard all weights are merged at once: else nothing is measured"


@torch.no_grad()
def test_experts_are_written_as_their_family_keeps_them(tmp_path):
    from transformers import MixtralConfig, MixtralForCausalLM

    shape = dict(vocab_size=101, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    torch.manual_seed(0)
    model = MixtralForCausalLM(MixtralConfig(**shape, num_key_value_heads=2, num_local_experts=2)).eval()
    model.save_pretrained(tmp_path / "stock")
    export(model, tmp_path / "out")
    from safetensors import safe_open

    names = [sorted(safe_open(tmp_path / f / "model.safetensors", "pt").keys()) for f in ("stock", "out")]
    assert names[0] == names[1]
    ids = tokens(1, 40)
    assert torch.equal(reloaded(tmp_path / "out")(ids).logits, model(ids).logits)


def test_a_folder_with_something_in_it_is_refused(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="not an empty folder"):
        export(tiny(), tmp_path / "out")
    assert left_behind(tmp_path) == ["out"] and left_behind(tmp_path / "out") == ["mine.txt"]


def test_the_converter_finds_the_checkpoint_in_a_folder_of_its_name(tmp_path):
    code = "Path(sys.argv[3]).write_text(Path(sys.argv[1]).name)"
    character_tokenizer().save_pretrained(tmp_path / "tokenizer")
    options = {"converter": fake_converter(tmp_path, code), "tokenizer": tmp_path / "tokenizer"}
    export(tiny(), tmp_path / "smollm2-yarn", target="llama.cpp", **options)
    assert (tmp_path / "smollm2-yarn" / "model.gguf").read_text() == "smollm2-yarn"
    assert sorted(left_behind(tmp_path)) == ["converter", "smollm2-yarn", "tokenizer"]


@pytest.mark.parametrize("where", ["link", "dangling link", "folder that one is in"])
def test_an_empty_folder_is_filled_and_stays_the_same_one(where, tmp_path, monkeypatch):
    real = tmp_path / "real"
    out = tmp_path / "link" if "link" in where else real
    if where != "dangling link":
        real.mkdir()
    if "link" in where:
        out.symlink_to(real)
    if where == "folder that one is in":
        monkeypatch.chdir(real)
        out = "."
    before = None if where == "dangling link" else real.stat().st_ino
    export(tiny(), out)
    assert reloaded(real) and not [name for name in left_behind(real) if name.startswith(".")]
    assert before in (None, real.stat().st_ino) and set(left_behind(tmp_path)) <= {"real", "link"}


def test_the_config_is_the_last_file_that_comes_into_an_empty_folder(tmp_path, monkeypatch):
    """What was killed before is no checkpoint to anybody."""
    moved, rename = [], Path.rename
    monkeypatch.setattr(Path, "rename", lambda file, to: moved.append(Path(to)) or rename(file, to))
    (tmp_path / "out").mkdir()
    export(tiny(), tmp_path / "out")
    assert moved[-1] == tmp_path / "out/config.json" and set(moved) >= set((tmp_path / "out").iterdir())


def test_what_a_killed_export_has_left_is_named(tmp_path, monkeypatch):
    """It is hidden and as large as the model, and in a folder that looks empty it is what makes the next one fail."""
    killed = tmp_path / "out" / ".out-unfinished-abc"
    killed.mkdir(parents=True)
    warned = []
    monkeypatch.setattr(writing.logger, "warning", warned.append)
    with pytest.raises(FileExistsError):
        export(tiny(), tmp_path / "out")
    assert len(warned) == 1 and warned[0].startswith(f"{killed} was left by a process that was killed while it wrote ")
    assert killed.is_dir()


def test_views_that_change_inference_are_refused(tmp_path):
    model = patch_model(tiny(), "nope", when="always")
    with pytest.raises(ValueError, match="a view changes inference too"):
        export(model, tmp_path / "out")
    unpatch_model(model)
    with rope_view(model, "nope"), pytest.raises(ValueError, match="a view changes inference too"):
        export(model, tmp_path / "out")
    export(patch_model(model, "skip", skip=Uniform(1, 8)), tmp_path / "out")


@torch.no_grad()
def test_a_model_whose_config_names_no_window(tmp_path):
    model, ids = tiny_family("recurrent_gemma"), tokens(1, 40)
    export(model, tmp_path / "out", target="vllm")
    assert torch.equal(reloaded(tmp_path / "out")(ids).logits, model(ids).logits)
    with pytest.raises(ValueError, match="window must be left out for model type 'recurrent_gemma', whose config nam"):
        export(model, tmp_path / "window", window=64)


def test_a_smaller_window_is_refused_where_it_would_change_the_model(tmp_path):
    """Dynamic NTK begins where the config's window ends: under a smaller one it is another model, in silence."""
    model = patch_model(tiny(), "dynamic-ntk", factor=4.0)
    with pytest.raises(ValueError, match=f"reads the {WINDOW} positions of the config, got {WINDOW - 10}"):
        export(model, tmp_path / "out", window=WINDOW - 10)
    assert left_behind(tmp_path) == []
    export(model, tmp_path / "out", window=WINDOW)
    yarn = export(patch_model(tiny(), "yarn", factor=4.0), tmp_path / "yarn", target="vllm", window=2 * WINDOW)
    assert yarn.command.endswith(f"--max-model-len {2 * WINDOW}")
    ids = tokens(1, 3 * WINDOW)
    with torch.no_grad():
        expected = patch_model(tiny(), "yarn", factor=4.0)(ids).logits
        assert torch.equal(reloaded(tmp_path / "yarn")(ids).logits, expected)


def test_llama_cpp_without_a_converter_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="git clone https://github.com/ggml-org/llama.cpp"):
        export(tiny(), tmp_path / "out", target="llama.cpp")


def test_what_a_converter_lacks_is_told_before_and_after_it_begins(tmp_path, monkeypatch):
    broken = fake_converter(tmp_path, "import no_such_package")
    with pytest.raises(ImportError, match="does not start: .*no_such_package'. Install what it needs with "):
        require_runs(broken)
    with pytest.raises(ValueError, match="did not convert the checkpoint: .*no_such_package'. Install what it needs"):
        convert(broken, tmp_path)
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(ImportError, match="needs the package sentencepiece. .* or with pip install sentencepiece"):
        require_runs(fake_converter(tmp_path, "pass"))


def test_a_converter_that_fails_leaves_nothing(tmp_path):
    tiny().save_pretrained(tmp_path / "source")
    (tmp_path / "source" / "tokenizer.json").write_text("{}")
    broken = fake_converter(tmp_path, "sys.exit('no such architecture')")
    with pytest.raises(ValueError, match="did not convert the checkpoint: no such architecture.$"):
        export(tmp_path / "source", tmp_path / "out", target="llama.cpp", converter=broken)
    assert sorted(left_behind(tmp_path)) == ["converter", "source"]
    done = export(tmp_path / "source", tmp_path / "out", target="llama.cpp", converter=fake_converter(tmp_path))
    assert (tmp_path / "out" / "model.gguf").read_bytes() == b"GGUF"
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    assert done.command == f"llama-server -m {tmp_path / 'out' / 'model.gguf'} -c {WINDOW}"


@pytest.mark.parametrize(
    ("model_type", "pre_tokenizer", "byte_fallback", "refused"),
    [
        ("llama", {"type": "ByteLevel"}, True, True),
        ("mistral", {"type": "Sequence", "pretokenizers": [{"type": "Digits"}, {"type": "ByteLevel"}]}, True, True),
        ("qwen2", {"type": "ByteLevel"}, True, False),  # its converter knows one kind of tokenizer
        ("llama", {"type": "ByteLevel"}, False, False),
        ("llama", None, True, False),  # SentencePiece's own, Llama 2's
    ],
)
def test_a_tokenizer_that_llama_cpp_would_take_for_another_is_refused(
    tmp_path, model_type, pre_tokenizer, byte_fallback, refused
):
    """Bytes with byte_fallback and a sequence of decoders: llama.cpp served other tokens, and ended no chat."""
    tiny(model_type).save_pretrained(tmp_path / "source")
    tokenizer = {
        "pre_tokenizer": pre_tokenizer,
        "decoder": {"type": "Sequence"},
        "model": {"type": "BPE", "byte_fallback": byte_fallback},
    }
    (tmp_path / "source" / "tokenizer.json").write_text(json.dumps(tokenizer))
    options = {"target": "llama.cpp", "converter": fake_converter(tmp_path)}
    if refused:
        with pytest.raises(ValueError, match="would take this tokenizer for SentencePiece's"):
            export(tmp_path / "source", tmp_path / "out", **options)
        assert not (tmp_path / "out").exists()
    else:
        export(tmp_path / "source", tmp_path / "out", **options)
