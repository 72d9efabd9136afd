"""Every rescaling: frequencies against their formulas, reload against what ran, and exact undo."""

import copy
import json
import math
import subprocess
import sys

import pytest
import torch
from support import oracle
from support.tiny import WINDOW, tiny, tokens
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
)

from rope_patch import describe, native_rope, patch_model, unpatch_model
from rope_patch.rescalings import RESCALINGS as REGISTRY

THETA, D, FACTOR = 10000.0, 8, 4.0
LONG = [1.0, 1.5, 3.0, 4.0]
RESCALINGS = {
    "pi": {"factor": FACTOR},
    "ntk": {"factor": FACTOR},
    "abf": {"theta": 5e5},
    "yarn": {"factor": FACTOR},
    "llama3": {"factor": FACTOR},
    "longrope": {"factor": FACTOR, "long_factor": LONG},
    "dynamic-ntk": {"factor": FACTOR},
}
L = 40


def expected(method, seq_len):
    """(frequencies, factor of cos and sin) in float64, from the papers' formulas."""
    j = torch.arange(D // 2, dtype=torch.float64)
    theta = THETA ** (-2 * j / D)
    if method == "pi":
        return theta / FACTOR, 1.0
    if method == "ntk":
        return (THETA * FACTOR ** (D / (D - 2))) ** (-2 * j / D), 1.0
    if method == "abf":
        return 5e5 ** (-2 * j / D), 1.0
    if method == "yarn":

        def c(turns):
            return D * math.log(WINDOW / (2 * math.pi * turns)) / (2 * math.log(THETA))

        low, high = max(math.floor(c(32)), 0), min(math.ceil(c(1)), D - 1)
        g = 1 - ((j - low) / (high - low)).clamp(0, 1)
        return (1 - g) * theta / FACTOR + g * theta, 0.1 * math.log(FACTOR) + 1
    if method == "llama3":
        turns = WINDOW * theta / (2 * math.pi)
        m = ((turns - 1) / (4 - 1)).clamp(0, 1)
        return (1 - m) * theta / FACTOR + m * theta, 1.0
    if method == "longrope":
        divisors = torch.tensor(LONG if seq_len > WINDOW else [1.0] * 4, dtype=torch.float64)
        return theta / divisors, math.sqrt(1 + math.log(FACTOR) / math.log(WINDOW))
    n = max(seq_len, WINDOW)
    return (THETA * (FACTOR * n / WINDOW - (FACTOR - 1)) ** (D / (D - 2))) ** (-2 * j / D), 1.0


def test_every_rescaling_is_here():
    missing = set(REGISTRY) - set(RESCALINGS) - {"drop-rope"}  # which has no frequencies: a test file of its own
    assert not missing, f"add options of {missing} to RESCALINGS above, and their frequencies to `expected`"


@pytest.mark.parametrize("seq_len", [L, WINDOW + 20], ids=["inside", "beyond"])
@pytest.mark.parametrize("method", RESCALINGS)
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
@torch.no_grad()
def test_logits_are_those_of_the_formula(family, method, seq_len):
    model = patch_model(tiny(family, dtype=torch.float64), method, **RESCALINGS[method])
    ids = tokens(2, seq_len)
    frequencies, factor = expected(method, seq_len)
    index, visible = torch.arange(seq_len).expand(2, -1), oracle.causal(seq_len).expand(2, -1, -1)
    right = oracle.logits(oracle.weights_of(model), model.config, ids, index, visible, frequencies, factor)
    torch.testing.assert_close(model(ids).logits, right, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("method", RESCALINGS)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "mistral-sliding"])
@torch.no_grad()
def test_reload_gives_the_same_bits(family, method, tmp_path):
    model = patch_model(tiny(family), method, **RESCALINGS[method])
    ids = tokens(2, WINDOW + 20)
    logits = model(ids).logits
    built = type(model)(model.config)  # Transformers' own model of that config
    built.load_state_dict(model.state_dict())
    assert torch.equal(built.eval()(ids).logits, logits)
    model.save_pretrained(tmp_path)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits, logits)
    assert isinstance(json.loads((tmp_path / "config.json").read_text())["max_position_embeddings"], int)


@torch.no_grad()
def test_reload_in_a_new_process_without_this_package(tmp_path):
    model = patch_model(tiny(), "yarn", factor=FACTOR)
    ids = tokens(1, L)
    model.save_pretrained(tmp_path)
    torch.save(ids, tmp_path / "ids.pt")
    code = (
        "import sys, torch, transformers; d = sys.argv[1]\n"
        "m = transformers.AutoModelForCausalLM.from_pretrained(d)\n"
        "torch.save(m(torch.load(d + '/ids.pt')).logits, d + '/logits.pt')\n"
        "assert 'rope_patch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, cwd=tmp_path)
    assert torch.equal(torch.load(tmp_path / "logits.pt"), model(ids).logits)


@pytest.mark.parametrize("method", RESCALINGS)
@torch.no_grad()
def test_native_rope_and_undo_are_exact(method):
    model = tiny()
    ids = tokens(2, L)
    plain, config = model(ids).logits, model.config.to_dict()
    buffers = dict(model.model.rotary_emb.named_buffers())
    patch_model(model, method, **RESCALINGS[method])
    model(tokens(1, WINDOW + 20))  # lets dynamic RoPE types move
    after = model(ids).logits
    with native_rope(model):
        assert torch.equal(model(ids).logits, plain)
    assert torch.equal(model(ids).logits, after)
    unpatch_model(model)
    assert torch.equal(model(ids).logits, plain)
    assert model.config.to_dict() == config
    assert all(b is buffers[n] for n, b in model.model.rotary_emb.named_buffers())
    assert "_rope_patch" not in vars(model.model)
    assert not model._forward_pre_hooks and not model.model._forward_pre_hooks and not model.model._forward_hooks


@torch.no_grad()
def test_a_second_rescaling_starts_from_the_native_schedule():
    ids = tokens(1, L)
    once = patch_model(tiny(), "yarn", factor=FACTOR)
    again = patch_model(patch_model(patch_model(tiny(), "pi", factor=8), "yarn", factor=2.0), "yarn", factor=FACTOR)
    assert torch.equal(once(ids).logits, again(ids).logits)
    assert again.config.rope_parameters == once.config.rope_parameters
    assert describe(again).trained_window == WINDOW and describe(again).target_window == WINDOW * 4


def test_a_second_rescaling_that_names_no_window_declares_the_native_one():
    model = patch_model(patch_model(tiny(), "yarn", factor=FACTOR), "abf", theta=1e6)
    assert model.config.max_position_embeddings == WINDOW


def test_written_configs_say_everything_explicitly():
    yarn = patch_model(tiny(), "yarn", factor=4).config
    assert yarn.max_position_embeddings == 4 * WINDOW and isinstance(yarn.max_position_embeddings, int)
    assert yarn.rope_parameters == {
        "rope_type": "yarn",
        "rope_theta": THETA,
        "factor": 4.0,
        "original_max_position_embeddings": WINDOW,
    }
    assert patch_model(tiny(), "dynamic-ntk", factor=4.0).config.max_position_embeddings == WINDOW
    assert patch_model(tiny(), "pi", factor=1.7).config.max_position_embeddings == round(1.7 * WINDOW)
    extended = patch_model(tiny(), "abf", theta=1e6, max_position_embeddings=1000).config
    assert extended.max_position_embeddings == 1000 and extended.rope_parameters["rope_theta"] == 1e6


@torch.no_grad()
def test_cast_to_bf16_does_not_touch_frequencies():
    model = patch_model(tiny(), "yarn", factor=FACTOR)
    exact = model.model.rotary_emb.inv_freq.clone()
    model.to(torch.bfloat16)
    assert model.model.rotary_emb.inv_freq.dtype == torch.bfloat16  # what Transformers alone would go on with
    ids = tokens(1, L)
    logits = model(ids).logits
    assert torch.equal(model.model.rotary_emb.inv_freq, exact)
    reloaded = tiny(dtype=torch.bfloat16)
    patch_model(reloaded, "yarn", factor=FACTOR)
    assert torch.equal(reloaded(ids).logits, logits)


@torch.no_grad()
def test_a_patch_heals_a_model_that_was_cast_before():
    model = tiny().to(torch.bfloat16)
    patch_model(model, "standard")
    assert torch.equal(model.model.rotary_emb.inv_freq, tiny().model.rotary_emb.inv_freq)
    assert torch.equal(
        unpatch_model(model).model.rotary_emb.inv_freq, tiny().to(torch.bfloat16).model.rotary_emb.inv_freq
    )


@torch.no_grad()
def test_softmax_scales_that_hold_yarns_factor_follow(tmp_path):
    config = DeepseekV3Config(
        vocab_size=101, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4, num_experts_per_tok=2, n_group=1,
        topk_group=1, kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
        first_k_dense_replace=1,
        max_position_embeddings=WINDOW, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = DeepseekV3ForCausalLM(config).eval()
    scale = model.model.layers[0].self_attn.scaling
    ids = tokens(1, L)
    plain = model(ids).logits
    patch_model(model, "yarn", factor=FACTOR, mscale=1.0, mscale_all_dim=1.0)
    assert model.model.layers[0].self_attn.scaling == pytest.approx(scale * (0.1 * math.log(FACTOR) + 1) ** 2)
    logits = model(ids).logits
    model.save_pretrained(tmp_path)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits, logits)
    with native_rope(model):
        assert torch.equal(model(ids).logits, plain)
    assert torch.equal(unpatch_model(model)(ids).logits, plain)


@torch.no_grad()
def test_layers_with_a_window_keep_their_frequencies(tmp_path):
    config = Gemma3TextConfig(
        vocab_size=101, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=WINDOW, sliding_window=8,
        layer_types=["sliding_attention", "full_attention"], pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Gemma3ForCausalLM(config).eval()
    rotary = model.model.rotary_emb
    local, full = rotary.sliding_attention_inv_freq.clone(), rotary.full_attention_inv_freq.clone()
    patch_model(model, "pi", factor=FACTOR)
    assert torch.equal(rotary.sliding_attention_inv_freq, local)
    torch.testing.assert_close(rotary.full_attention_inv_freq, full / FACTOR)
    ids = tokens(1, L)
    logits = model(ids).logits
    model.save_pretrained(tmp_path)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits, logits)


LLAMA_31 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": WINDOW // 8,
}  # fmt: skip


def test_a_trained_schedule_is_not_thrown_away_in_silence():
    model = tiny(rope_parameters=dict(LLAMA_31))
    before = model.config.to_dict()
    for method in ("pi", "yarn", "llama3", "dynamic-ntk"):
        with pytest.raises(ValueError, match="this model was trained with 'llama3'"):
            patch_model(model, method, factor=2.0)
    assert model.config.to_dict() == before and not describe(model).patched
    patch_model(model, "abf", theta=1e6)
    assert model.config.rope_parameters == {**LLAMA_31, "rope_theta": 1e6}
    patch_model(model, "yarn", factor=2.0, original_max_position_embeddings=WINDOW)
    assert model.config.rope_parameters["rope_type"] == "yarn" and model.config.max_position_embeddings == 2 * WINDOW


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("yrn", {}, "Unknown method 'yrn'. Did you mean 'yarn'\\? Known: abf"),
        ("yarn", {"factr": 4}, "Unknown option 'factr' of method 'yarn'. Did you mean 'factor'\\?"),
        ("yarn", {}, "method 'yarn' needs factor, got {}. Its options: factor, original_max"),
        ("pi", {"factor": 0}, "rescaling 'pi': factor must be a finite number of at least 1 .* got 0."),
        ("pi", {"factor": -2.0}, "factor must be a finite number of at least 1"),
        ("pi", {"factor": "4"}, "factor must be a finite number of at least 1 .* got '4'."),
        ("pi", {"factor": float("nan")}, "factor must be a finite number of at least 1"),
        ("pi", {"factor": 2.0**20}, "the target window would be 67108864 positions; at most 16777216"),
        ("abf", {"theta": 0}, "rescaling 'abf': theta must be a finite number above 1, got 0."),
        ("abf", {"theta": 1e6, "max_position_embeddings": 1.5}, "max_position_embeddings must be an integer"),
        ("yarn", {"factor": 2, "beta_fast": -1}, "beta_fast must be a finite number above 0, got -1."),
        (
            "llama3",
            {"factor": 2, "low_freq_factor": 4},
            "low_freq_factor must be below high_freq_factor, got 4 and 4.0.",
        ),
        ("longrope", {"factor": 2}, "method 'longrope' needs long_factor, got {'factor': 2}"),
        ("longrope", {"factor": 2, "long_factor": [1.0]}, "one divisor for each of the model's 4 frequencies, got 1."),
        ("longrope", {"factor": 2, "long_factor": [1, 1, 1, 0]}, "long_factor\\[3\\] must be a finite number above 0"),
        ("yarn", {"factor": 2, "seed": 1}, "seed and when belong to views"),
        ("skip", {"when": "eval"}, "when must be one of \\('train', 'always'\\), got 'eval'."),
        (3, {}, "Unknown method 3. Known:"),
        ("YaRN", {}, "Unknown method 'YaRN'. Did you mean 'yarn'\\?"),
        (REGISTRY["yarn"], {}, "Unknown method Yarn, a class: give an instance of it, or a name."),
        (torch.nn.Sequential(torch.nn.Identity()), {}, "Unknown method of type Sequential. Known: abf"),
        ("cream", {"target": 64, "sigma": "5"}, "view 'cream': sigma must be a finite number above 0, from .* got '5'"),
    ],
)
def test_what_cannot_be_patched_is_said_and_changes_nothing(method, options, message):
    model = tiny()
    before, keys = model.config.to_dict(), set(vars(model.model))
    ids = tokens(1, L)
    plain = model(ids).logits
    with pytest.raises(ValueError, match=message):
        patch_model(model, method, **options)
    assert model.config.to_dict() == before and set(vars(model.model)) == keys
    assert not model.model._forward_pre_hooks
    assert torch.equal(model(ids).logits, plain)


def test_ntk_has_no_exponent_for_a_single_frequency():
    model = tiny("llama", hidden_size=8, head_dim=2)
    with pytest.raises(
        ValueError, match="rescaling 'ntk' needs 2 frequencies or more, and this model rotates 2 features"
    ):
        patch_model(model, "ntk", factor=2.0)


def test_a_model_without_rope_is_refused_by_name():
    gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=101))
    with pytest.raises(ValueError, match="model type 'gpt2' has no RoPE that can be patched"):
        patch_model(gpt2, "skip")
    with pytest.raises(ValueError, match="model must be a loaded model, got 'gpt2': load it with AutoModelForCausalLM"):
        patch_model("gpt2", "skip")
    with pytest.raises(ValueError, match="must be or wrap a transformers.PreTrainedModel, got Linear"):
        patch_model(torch.nn.Linear(2, 2), "skip")


def test_views_on_dynamic_schedules_are_refused_both_ways():
    model = patch_model(tiny(), "dynamic-ntk", factor=2.0)
    with pytest.raises(ValueError, match="rope type 'dynamic' picks its frequencies by the longest row"):
        patch_model(model, "skip")
    other = patch_model(tiny(), "skip")
    with pytest.raises(ValueError, match="rope type 'dynamic'"):
        patch_model(other, "dynamic-ntk", factor=2.0)
    assert describe(other).rescaling is None and other.config.rope_parameters["rope_type"] == "default"


@torch.no_grad()
def test_longrope_takes_its_regime_from_the_true_positions():
    from rope_patch import rope_view
    from rope_patch.views import Skip

    model = patch_model(tiny(), "longrope", factor=FACTOR, long_factor=LONG)
    ids = tokens(1, L)
    plain = model(ids).logits
    with rope_view(model, Skip(split=10, skip=3 * WINDOW)):
        seen = model(ids).logits
    torch.testing.assert_close(seen[:, :10], plain[:, :10], rtol=0, atol=1e-5)
    assert torch.equal(model(ids).logits, plain)


@pytest.mark.parametrize(("options", "is_read"), [({}, True), ({"truncate": True}, True), ({"truncate": False}, False)])
def test_an_option_that_transformers_drops_for_layer_types_is_refused(options, is_read):
    """It looks for `truncate` beside the layer types of Gemma 3, where no such key can be."""
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 1, "num_key_value_heads": 1}
    types = ["sliding_attention", "full_attention"]
    config = Gemma3TextConfig(
        **shape, vocab_size=16, head_dim=64, num_hidden_layers=2, layer_types=types, max_position_embeddings=512
    )
    model = Gemma3ForCausalLM(config)
    before = copy.deepcopy(model.config.to_dict())
    if is_read:
        patch_model(model, "yarn", factor=4.0, **options)
        return
    with pytest.raises(ValueError, match="gemma3_text.*whose RoPE differs by layer.*Leave that option out"):
        patch_model(model, "yarn", factor=4.0, **options)
    assert model.config.to_dict() == before
