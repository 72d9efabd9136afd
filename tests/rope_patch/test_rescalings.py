"""Every rescaling: frequencies against their formulas, reload against what ran, and exact undo."""

import copy
from contextlib import nullcontext

import pytest
import torch
from support import oracle
from support.gathered import gathered
from support.launched import run_python
from support.rescalings import FACTOR, THETA, L, require_refused
from support.tiny import VOCAB, WINDOW, tiny, tokens
from transformers import (
    ApertusConfig,
    ApertusForCausalLM,
    AutoModelForCausalLM,
    DiffLlamaConfig,
    DiffLlamaForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    Phi3Config,
    Phi3ForCausalLM,
)

from rope_patch import describe, native_rope, patch_model, rope_view, unpatch_model
from rope_patch.methods import resolve_rescaling
from rope_patch.rescalings import RESCALINGS as REGISTRY
from rope_patch.testing import check_rescaling
from rope_patch.testing.rescalings import check_saving

CASES = gathered(REGISTRY, "CASES")

# of families that support.tiny does not make
SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": WINDOW, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip


def test_every_rescaling_is_here():
    # 'drop-rope' has no frequencies: tests/rope_patch/rescalings/test_drop_rope.py compares it with the view 'nope'
    lacking = set(REGISTRY) - set(CASES) - {"drop-rope"}
    assert not lacking, "\n".join(lines_to_add(REGISTRY[name], name) for name in lacking)


def lines_to_add(cls, name):
    """To the test file of a rescaling, for those who add one."""
    stem = cls.__module__.rpartition(".")[2]
    return (
        f"Add to tests/rope_patch/rescalings/test_{stem}.py its options and the formula written out once more:\n"
        "frequencies [D / 2] in float64, in radians per position, and the factor of cos and sin, of rows of seq_len:\n"
        "from support.rescalings import Case  # and NATIVE, the frequencies before it\n"
        f'CASES = {{"{name}": Case({{...}}, lambda seq_len: (..., 1.0))}}'
    )


def with_a_family(*families):
    """Every rescaling, each with one of the families in turn."""
    return [(families[i % len(families)], method) for i, method in enumerate(CASES)]


@pytest.mark.parametrize("seq_len", [L, WINDOW + 20], ids=["inside", "beyond"])
@pytest.mark.parametrize(("family", "method"), with_a_family("llama", "qwen3", "mistral"))
@torch.no_grad()
def test_logits_are_those_of_the_formula(family, method, seq_len):
    model = patch_model(tiny(family, dtype=torch.float64), method, **CASES[method].options)
    ids = tokens(2, seq_len)
    frequencies, factor = CASES[method].expected(seq_len)
    index, visible = torch.arange(seq_len).expand(2, -1), oracle.causal(seq_len).expand(2, -1, -1)
    scale = CASES[method].query_scale(index.double())
    weights = oracle.weights_of(model)
    right = oracle.logits(weights, model.config, ids, index, visible, frequencies, factor, query_scale=scale)
    torch.testing.assert_close(model(ids).logits, right, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("family", "method"), with_a_family("llama", "qwen2", "qwen3", "mistral", "mistral-sliding"))
@torch.no_grad()
def test_reload_gives_the_same_bits(family, method):
    check_saving(resolve_rescaling(method, CASES[method].options), lambda: tiny(family))


@pytest.mark.slow
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
    run_python("-c", code, str(tmp_path), cwd=tmp_path).check_returncode()
    assert torch.equal(torch.load(tmp_path / "logits.pt"), model(ids).logits)


@pytest.mark.parametrize("method", CASES)
def test_every_rescaling_keeps_what_it_promises(method):
    check_rescaling(resolve_rescaling(method, CASES[method].options))


def picking_by_row(kind):
    """A model whose native RoPE type picks frequencies by the row in every forward, from its config."""
    divisors = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 3.0, 4.0]}
    if kind == "phi3 longrope":
        torch.manual_seed(0)
        return Phi3ForCausalLM(
            Phi3Config(
                vocab_size=101, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, max_position_embeddings=WINDOW, original_max_position_embeddings=WINDOW // 2,
                rope_parameters={**divisors, "rope_theta": THETA}, pad_token_id=0, bos_token_id=1, eos_token_id=2,
                initializer_range=0.2,
            )
        ).eval()  # fmt: skip
    dynamic = {"rope_type": "dynamic", "factor": 2.0}
    longrope = {**divisors, "original_max_position_embeddings": WINDOW // 2}
    return tiny(rope_parameters={**(dynamic if kind == "dynamic" else longrope), "rope_theta": THETA})


ONTO_PICKING = {
    "abf": {"theta": 1e6},
    "longrope": {"factor": 4.0, "long_factor": [1, 3, 6, 9], "original_max_position_embeddings": WINDOW // 2},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": WINDOW // 2},
    "drop-rope": {"max_position_embeddings": 8 * WINDOW},
}


@pytest.mark.parametrize(
    ("kind", "method"),
    [(kind, method) for kind in ("dynamic", "longrope") for method in ONTO_PICKING]
    + [("phi3 longrope", "abf"), ("phi3 longrope", "longrope")],  # the family takes no other types
)
@torch.no_grad()
def test_native_rope_is_exact_where_forwards_read_the_config(kind, method):
    untouched, model = picking_by_row(kind), patch_model(picking_by_row(kind), method, **ONTO_PICKING[method])
    rows = [tokens(1, n) for n in (WINDOW // 4, WINDOW - 4, WINDOW + 20, WINDOW // 4)]
    native = [untouched(row, use_cache=False).logits for row in rows]
    rescaled = [model(row, use_cache=False).logits for row in rows]
    assert not torch.equal(native[0], rescaled[0])
    config = model.config.to_dict()
    for _ in range(2):
        with native_rope(model), native_rope(model):
            inside = [model(row, use_cache=False).logits for row in rows]
            assert model.config.to_dict() == config
        assert all(map(torch.equal, inside, native))
        with pytest.raises(KeyError, match="stop"), native_rope(model):
            raise KeyError("stop")
        assert all(map(torch.equal, [model(row, use_cache=False).logits for row in rows], rescaled))
        assert model.model.rotary_emb.config is model.config


@torch.no_grad()
def test_a_second_rescaling_starts_from_the_native_schedule():
    ids = tokens(1, L)
    once = patch_model(tiny(), "yarn", factor=FACTOR)
    again = patch_model(patch_model(patch_model(tiny(), "pi", factor=8), "yarn", factor=2.0), "yarn", factor=FACTOR)
    assert torch.equal(once(ids).logits, again(ids).logits)
    assert again.config.rope_parameters == once.config.rope_parameters
    assert describe(again).trained_window == WINDOW and describe(again).target_window == WINDOW * 4


@torch.no_grad()
def test_a_model_that_was_saved_takes_another_rescaling(tmp_path):
    """Saving leaves the name of a dtype in the config, of which Apertus builds its activation."""
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    model, ids = ApertusForCausalLM(ApertusConfig(**SHAPE, rope_parameters=rope)).eval(), tokens(1, L)
    for factor in (2.0, FACTOR):
        patch_model(model, "yarn", factor=factor).save_pretrained(tmp_path)
        reloaded = ApertusForCausalLM.from_pretrained(tmp_path).eval()
        assert torch.equal(reloaded(ids).logits, model(ids).logits)


def test_a_rescaling_leaves_the_generator_of_torch_alone():
    """DiffLlama's constructor draws, and softmax scales are read off a model that is constructed."""
    model = DiffLlamaForCausalLM(DiffLlamaConfig(**SHAPE))
    before = torch.get_rng_state()
    patch_model(model, "yarn", factor=FACTOR)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_second_rescaling_that_names_no_window_declares_the_native_one():
    model = patch_model(patch_model(tiny(), "yarn", factor=FACTOR), "abf", theta=1e6)
    assert model.config.max_position_embeddings == WINDOW


@pytest.mark.parametrize(
    ("method", "options", "remedy"),
    [
        ("abf", {"theta": 1e6}, "pass max_position_embeddings to 'abf' to write another."),
        (
            "dynamic-ntk",
            {"factor": FACTOR},
            "'dynamic-ntk' has no option that changes it, so tell such a program the longer window.",
        ),
    ],
)
def test_a_window_that_stays_is_told_with_what_can_be_done(method, options, remedy, caplog):
    patch_model(tiny(), method, **options)
    assert f"max_position_embeddings={WINDOW}" in caplog.text and caplog.messages[-1].endswith(remedy)


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


def exact_in_bfloat16():
    """A model whose weights a cast down and up again does not move, so that its frequencies alone may differ."""
    model = tiny(num_hidden_layers=1)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return model


@pytest.mark.parametrize(
    ("method", "compiled"),
    [("yarn", False), ("yarn", True), ("dynamic-ntk", False), ("longrope", False), ("skip", False)],
)
@torch.no_grad()
def test_a_cast_down_and_up_again_does_not_touch_frequencies(method, compiled):
    torch._dynamo.reset()
    options = {"skip": {}, "longrope": {"factor": FACTOR, "long_factor": [1.0, 2.0, 3.0, 4.0]}}
    model = patch_model(exact_in_bfloat16(), method, **options.get(method, {"factor": FACTOR}))
    run = torch.compile(model, backend="eager") if compiled else model
    ids = tokens(1, L)
    expected, frequencies = run(ids).logits, model.model.rotary_emb.inv_freq.clone()
    for _ in range(2):
        model.bfloat16()
        model.float()
        assert not torch.equal(model.model.rotary_emb.inv_freq, frequencies)  # and nothing in their dtype says so
        assert torch.equal(run(ids).logits, expected)
        assert torch.equal(model.model.rotary_emb.inv_freq, frequencies)


@torch.no_grad()
def test_a_model_cast_down_and_up_again_is_the_one_that_it_saves(tmp_path):
    model = patch_model(exact_in_bfloat16(), "yarn", factor=FACTOR)
    model.bfloat16().save_pretrained(tmp_path)
    model.float()
    ids = tokens(1, L)
    assert torch.equal(
        AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)(ids).logits, model(ids).logits
    )


@torch.no_grad()
def test_new_tensors_with_the_same_frequencies_are_kept():
    """As `model.to(device)` makes them."""
    model = patch_model(tiny(), "dynamic-ntk", factor=FACTOR)
    rotary, ids = model.model.rotary_emb, tokens(1, L)
    model(ids)
    grown = rotary.inv_freq.clone()  # by a row beyond the window, and kept for the next one
    moved = rotary._buffers["original_inv_freq"] = rotary.original_inv_freq.clone()
    model(ids[:, : WINDOW + 1])
    assert rotary.original_inv_freq is moved and torch.equal(rotary.inv_freq, grown)
    copied = copy.deepcopy(patch_model(tiny(), "yarn", factor=FACTOR))
    frequencies = copied.model.rotary_emb.inv_freq
    copied(ids)
    assert copied.model.rotary_emb.inv_freq is frequencies


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("in_block", [False, True])
def test_a_patch_heals_a_model_that_was_cast_down_and_up_before(in_block, dtype):
    model, exact = tiny().to(dtype).float(), tiny().model.rotary_emb.inv_freq
    rounded = model.model.rotary_emb.inv_freq
    assert not torch.equal(rounded, exact)
    with rope_view(model, "standard") if in_block else nullcontext(patch_model(model, "standard")):
        assert torch.equal(model.model.rotary_emb.inv_freq, exact)
    assert torch.equal(unpatch_model(model).model.rotary_emb.inv_freq, rounded)


def test_last_bits_of_another_device_are_left_as_they_are():
    model = tiny()
    other = model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq * (1 + 2**-23)
    assert not torch.equal(other, tiny().model.rotary_emb.inv_freq)
    patch_model(model, "standard")
    assert model.model.rotary_emb.inv_freq is other


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


NTK_FACTOR = r"factor \(2 \* target window / trained window\) must be .* at least 1, got "


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("yrn", {}, "Unknown method 'yrn'. Did you mean 'yarn'\\? Known: abf"),
        ("skip", {"when": "eval"}, "when must be one of \\('train', 'always'\\), got 'eval'."),
        (3, {}, "Unknown method 3. Known:"),
        ("YaRN", {}, "Unknown method 'YaRN'. Did you mean 'yarn'\\?"),
        ("cream", {"target": 64, "sigma": "5"}, "view 'cream': sigma must be a number above 0, got '5'"),
        ("pi", {"factor": 0}, "rescaling 'pi': factor .* must be a number of at least 1, got 0."),
        ("pi", {"factor": -2.0}, "factor .* must be a number of at least 1"),
        ("pi", {"factor": "4"}, "factor .* must be a number of at least 1, got '4'."),
        ("pi", {"factor": float("nan")}, "factor .* must be a number of at least 1"),
        ("pi", {"factor": 2.0**20}, "the target window would be 67108864 positions; at most 16777216"),
        (
            "llama3",
            {"factor": 2, "low_freq_factor": 4},
            "low_freq_factor must be below high_freq_factor .*, got 4.0 and 4.0.",
        ),
        ("longrope", {"factor": 2}, "method 'longrope' needs long_factor, got {'factor': 2}"),
        ("longrope", {"factor": 2, "long_factor": [1.0]}, "one divisor for each of the model's 4 frequencies, got 1."),
        ("longrope", {"factor": 2, "long_factor": [1, 1, 1, 0]}, "long_factor\\[3\\] must be a number above 0"),
        ("yarn", {"factr": 4}, "Unknown option 'factr' of method 'yarn'. Did you mean 'factor'\\?"),
        ("yarn", {}, "method 'yarn' needs factor, got {}. Its options: factor, original_max"),
        ("yarn", {"factor": 2, "beta_fast": -1}, "beta_fast must be a number above 0, got -1."),
        (
            "yarn",
            {"factor": 2, "mscale": 0.5},
            "mscale must come with mscale_all_dim .* got mscale 0.5, mscale_all_dim None",
        ),
        (
            "yarn",
            {"factor": 2, "mscale": 0.5, "mscale_all_dim": 0.5, "attention_factor": 1.2},
            "mscale must come with mscale_all_dim and without attention_factor",
        ),
        ("yarn", {"factor": 2, "seed": 1}, "seed and when are arguments of views"),
        ("abf", {"theta": 0}, "rescaling 'abf': theta must be a number above 1, got 0."),
        ("abf", {"theta": 1e6, "max_position_embeddings": 1.5}, "max_position_embeddings must be an integer"),
        ("ntk", {"factor": 0.5}, NTK_FACTOR + "0.5"),
        ("ntk", {"factor": None}, NTK_FACTOR + "None"),
    ],
)
def test_what_cannot_be_is_said_and_changes_nothing(method, options, message):
    require_refused(method, options, message)


def test_a_model_without_rope_is_refused_by_name():
    gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=101))
    with pytest.raises(ValueError, match="model type 'gpt2' has no RoPE that can be patched"):
        patch_model(gpt2, "skip")
    with pytest.raises(ValueError, match="model must be a loaded model, got 'gpt2': load it with AutoModelForCausalLM"):
        patch_model("gpt2", "skip")
    with pytest.raises(ValueError, match="must be or wrap a transformers.PreTrainedModel, got Linear"):
        patch_model(torch.nn.Linear(2, 2), "skip")
