"""Rescaling models whose RoPE parameters are those of real model cards, beside a model of the edited card."""

import json
import math
from dataclasses import fields

import pytest
import torch
from support.families import tiny_family
from support.marks import BEFORE_5_17
from support.tiny import VOCAB
from transformers import AutoModelForCausalLM

from rope_patch import export, patch_model
from rope_patch.rescalings import RESCALINGS
from rope_patch.rope.rotary import find_decoder

ORIGIN = "original_max_position_embeddings"
# family, and keys of config.json as the card of a model has them, in the older form or the newer one. Divisors are as
# many as a tiny model has frequencies
CARDS = {
    "gpt-oss": ("gpt_oss", {
        "max_position_embeddings": 131072, "rope_theta": 150000, "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, ORIGIN: 4096, "rope_type": "yarn", "truncate": False,
        },
    }),
    "DeepSeek-V3": ("deepseek_v3", {
        "max_position_embeddings": 163840, "rope_theta": 10000, "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, ORIGIN: 4096,
            "type": "yarn",
        },
    }),
    "DeepSeek-V2-Lite": ("deepseek_v2", {
        "max_position_embeddings": 163840, "rope_theta": 10000, "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707, ORIGIN: 4096,
            "type": "yarn",
        },
    }),
    "Kimi-K2": ("deepseek_v3", {
        "max_position_embeddings": 131072, "rope_theta": 50000.0, "rope_scaling": {
            "beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0, ORIGIN: 4096,
            "type": "yarn",
        },
    }),
    "Olmo-3": ("olmo3", {
        "max_position_embeddings": 65536, "rope_theta": 500000, "rope_scaling": {
            "attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0, ORIGIN: 8192,
            "rope_type": "yarn",
        },
    }),
    "Ministral-3": ("ministral3", {
        "max_position_embeddings": 262144, "rope_parameters": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1, "mscale": 1.0,
            "mscale_all_dim": 1.0, ORIGIN: 16384, "rope_theta": 1000000.0, "rope_type": "yarn", "type": "yarn",
        },
    }),
    "a factor of its own": ("llama", {
        "max_position_embeddings": 131072, "rope_theta": 1000000.0, "rope_scaling": {
            "attention_factor": 1.0, "factor": 4.0, ORIGIN: 32768, "type": "yarn",
        },
    }),
    "Phi-4-mini": ("phi3", {
        "max_position_embeddings": 131072, ORIGIN: 4096, "partial_rotary_factor": 0.75, "rope_theta": 10000.0,
        "rope_scaling": {
            "long_factor": [1.0, 1.1, 2.0, 9.0, 20.0, 47.0], "short_factor": [1.0, 1.0, 1.1, 1.2, 1.5, 2.0],
            "type": "longrope",
        },
    }),
    "Phi-3.5-MoE": ("phimoe", {
        "max_position_embeddings": 131072, "rope_theta": 10000.0, "rope_scaling": {
            "long_factor": [1.0, 1.1, 2.0, 4.0, 9.0, 20.0, 30.0, 47.0], "long_mscale": 1.24316,
            "short_factor": [1.0, 1.0, 1.1, 1.2, 1.5, 2.0, 2.5, 3.0], "short_mscale": 1.1, ORIGIN: 4096,
            "type": "longrope",
        },
    }),
    "Llama-3.1": ("llama", {
        "max_position_embeddings": 131072, "rope_theta": 500000.0, "rope_scaling": {
            "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, ORIGIN: 8192, "rope_type": "llama3",
        },
    }),
    "Llama-4-Scout": ("llama4_text", {
        "max_position_embeddings": 10485760, "rope_theta": 500000.0, "rope_scaling": {
            "factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0, ORIGIN: 8192, "rope_type": "llama3",
        },
    }),
    "EXAONE-4": ("exaone4", {
        "max_position_embeddings": 131072, "rope_theta": 1000000, "rope_scaling": {
            "factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, ORIGIN: 8192, "rope_type": "llama3",
        },
    }),
    "Gemma-3": ("gemma3_text", {
        "max_position_embeddings": 131072, "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    }),
    "Qwen3-Next": ("qwen3_next", {
        "max_position_embeddings": 262144, "partial_rotary_factor": 0.25, "rope_theta": 10000000, "rope_scaling": None,
    }),
    "GLM-4.5": ("glm4_moe", {
        "max_position_embeddings": 131072, "partial_rotary_factor": 0.5, "rope_theta": 1000000, "rope_scaling": None,
    }),
}  # fmt: skip
ROPE = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "rope_local_base_freq", ORIGIN)


def built(card, **edits):
    """Transformers' model of a card whose RoPE block, in whichever form, has `edits`; None takes a key away."""
    family, keys = CARDS[card]
    shape = {key: value for key, value in tiny_family(family).config.to_dict().items() if key not in ROPE}
    block = "rope_parameters" if "rope_parameters" in keys else "rope_scaling"
    window = edits.pop("window", keys["max_position_embeddings"])
    edited = {key: value for key, value in {**(keys[block] or {}), **edits}.items() if value is not None}
    config_class = type(tiny_family(family).config)
    config = config_class(**{**shape, **keys, "max_position_embeddings": window, block: edited or None})
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


@torch.no_grad()
def logits(model):
    """Of rows that reach beyond 4096 and 16384 positions, after which queries are scaled and divisors are others."""
    ids = torch.randint(3, VOCAB, (1, 24), generator=torch.Generator().manual_seed(1))
    rows = []
    for far in (12, 5000, 70000):
        positions = torch.cat([torch.arange(12), far + torch.arange(12)])[None]
        rows.append(model(ids, position_ids=positions, attention_mask=torch.ones_like(ids), use_cache=False).logits)
    return torch.stack(rows)


def differ(one, other):
    return float((one - other).abs().max() / other.std())


# what a person would ask for: the method of the card's own rope type, and the block that the card would have then
AGAIN = {
    **{card: ("yarn", {}) for card in ("gpt-oss", "DeepSeek-V3", "DeepSeek-V2-Lite", "Kimi-K2", "Olmo-3",
                                       "Ministral-3", "a factor of its own")},
    **{card: ("llama3", {}) for card in ("Llama-3.1", "Llama-4-Scout", "EXAONE-4")},
    **{card: ("longrope", {"long_factor": CARDS[card][1]["rope_scaling"]["long_factor"]})
       for card in ("Phi-4-mini", "Phi-3.5-MoE")},
}  # fmt: skip


def named_origin(card):
    keys = CARDS[card][1]
    block = keys.get("rope_parameters") or keys["rope_scaling"]
    return block.get(ORIGIN) or keys[ORIGIN]


@pytest.mark.parametrize(
    "times", [pytest.param(1, marks=pytest.mark.slow, id="same factor"), pytest.param(2, id="twice")]
)
@pytest.mark.parametrize("card", AGAIN)
def test_rescaling_anew_is_the_card_with_another_factor(card, times, tmp_path):
    method, options = AGAIN[card]
    keys, origin = CARDS[card][1], named_origin(card)
    block = keys.get("rope_parameters") or keys["rope_scaling"]
    factor = times * block.get("factor", keys["max_position_embeddings"] / origin)
    edits = {"factor": factor, "window": round(origin * factor)}
    if card == "Olmo-3":  # 0.1 ln(8) + 1 in its card, which is the factor's own
        edits["attention_factor"] = 0.1 * math.log(factor) + 1
    right = logits(built(card, **edits))
    model = patch_model(built(card), method, factor=factor, original_max_position_embeddings=origin, **options)
    assert differ(logits(model), right) < 1e-5
    if times == 2 and card != "Phi-3.5-MoE":  # whose family reads no factor
        assert differ(right, logits(built(card))) > 1e-3
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(model))


# scaling keys of the block that each rescaling makes, of the window that it starts from and the model's divisors
FAR, NEAR = 64.0, 2.0
BLOCKS = {
    "yarn": lambda origin, n: {"rope_type": "yarn", "factor": FAR, ORIGIN: origin},
    "llama3": lambda origin, n: {
        "rope_type": "llama3", "factor": FAR, "low_freq_factor": 1.0, "high_freq_factor": 4.0, ORIGIN: origin,
    },
    "longrope": lambda origin, n: {
        "rope_type": "longrope", "factor": FAR, "short_factor": [1.0] * n, ORIGIN: origin,
        "long_factor": [1.0 + i for i in range(n)],
    },
    "drop-rope": lambda origin, n: {
        "rope_type": "llama3", "factor": 1e9, "low_freq_factor": 1.0, "high_freq_factor": 4.0, ORIGIN: 1,
    },
    "pi": lambda origin, n: {"rope_type": "linear", "factor": NEAR},
    "dynamic-ntk": lambda origin, n: {"rope_type": "dynamic", "factor": NEAR},
    "abf": lambda origin, n: {"rope_theta": 3e6},
}  # fmt: skip
DROPPED = dict.fromkeys(
    "type factor attention_factor beta_fast beta_slow mscale mscale_all_dim truncate short_factor long_factor "
    "low_freq_factor high_freq_factor short_mscale long_mscale".split()
)
ANY = set(BLOCKS) - {"pi", "dynamic-ntk"}  # from a native block of another type, whose window the caller names
SOFTMAX = "has no mscale_all_dim, by which the native RoPE parameters scale the softmax"
# card -> the rescalings that it takes, and why not the others, where that is not a native block of another type
TAKES = {
    **dict.fromkeys(("gpt-oss", "Olmo-3", "a factor of its own", "Llama-3.1", "Llama-4-Scout", "EXAONE-4"), (ANY, "")),
    **dict.fromkeys(("DeepSeek-V3", "DeepSeek-V2-Lite", "Kimi-K2"), ({"abf", "yarn"}, SOFTMAX)),
    "Ministral-3": (ANY - {"drop-rope"}, "scales its queries by how far a position lies beyond 16384"),
    **dict.fromkeys(
        ("Phi-4-mini", "Phi-3.5-MoE"), ({"abf", "longrope"}, "Transformers does not accept these RoPE parameters")
    ),
    "Gemma-3": ({"abf", "pi", "drop-rope"}, ""),
    **dict.fromkeys(("Qwen3-Next", "GLM-4.5"), (set(BLOCKS), "")),
}


@pytest.mark.parametrize("card", CARDS)
def test_a_rescaling_of_another_type_is_the_card_with_another_block_or_is_refused(card, tmp_path):
    takes, reason = TAKES[card]
    keys = CARDS[card][1]
    n = next(iter(find_decoder(built(card)).rotary_emb.buffers())).numel()
    native = keys.get("rope_parameters") or keys["rope_scaling"] or {}
    window, origin = keys["max_position_embeddings"], native.get(ORIGIN) or keys.get(ORIGIN)
    others = set(BLOCKS) - {AGAIN.get(card, ("", {}))[0]}
    if BEFORE_5_17 and card == "Olmo-3":
        others.remove("longrope")  # Transformers' own code raises UnboundLocalError where a layer type has it
    for method in others:
        block = BLOCKS[method](origin or window, n)
        names = {field.name for field in fields(RESCALINGS[method])}
        options = {"theta": 3e6} if method == "abf" else {k: v for k, v in block.items() if k in names}
        if card == "Gemma-3":
            options.pop(ORIGIN, None)
        if method not in takes:
            with pytest.raises(ValueError, match=f"which would be lost|exact in float32|{reason or '^$'}"):
                patch_model(built(card), method, **options)
            continue
        edits = block if method == "abf" else {**DROPPED, **block}
        reach = {"pi": NEAR * window, "abf": window, "dynamic-ntk": window, "drop-rope": window}
        if card == "Gemma-3" and method == "pi":  # its own factor goes on
            edits["factor"] = 8 * NEAR
        if card == "a factor of its own" and method == "longrope":
            edits["attention_factor"] = 1.0
        right = built(card, **edits, window=round(reach.get(method, FAR * (origin or window))))
        model = patch_model(built(card), method, **options)
        assert differ(logits(model), logits(right)) < 1e-5, method
        if method == max(others & takes):
            model.save_pretrained(tmp_path)
            assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(model))


def test_another_window_than_the_one_that_queries_are_scaled_by_is_refused():
    for options in ({}, {"original_max_position_embeddings": 4096}):
        plain = built("Ministral-3", rope_type="default", type=None)
        named = options.get(ORIGIN, 262144)
        with pytest.raises(ValueError, match=f"set {ORIGIN} to {named}, .* beyond 16384.*pass {ORIGIN}=16384"):
            patch_model(plain, "yarn", factor=2.0, **options)
    for method in ("pi", "dynamic-ntk", "ntk"):  # which set none: the scale stays
        model = patch_model(built("Ministral-3", rope_type="default", type=None), method, factor=1.0)
        right = built("Ministral-3", rope_type="default", type=None)
        assert differ(logits(model), logits(right)) < 1e-5


# what a program reads there and Transformers does not, and the block that says what Transformers computes
READ_ELSEWHERE = {
    "yarn": ({"attn_factor": 0.8, "extrapolation_factor": 0.5, "apply_yarn_scaling": False, "mscale": 0.5}, {}),
    "yarn, mscale_all_dim alone": ({"mscale_all_dim": 0.5}, {}),
    "yarn, both": ({"mscale": 0.7, "mscale_all_dim": 0.5}, {"mscale": 0.7, "mscale_all_dim": 0.5}),
    "yarn, attention_factor": (
        {"attention_factor": 1.1, "mscale": 0.7, "mscale_all_dim": 0.5}, {"attention_factor": 1.1},
    ),
    "linear": ({"rope_type": "linear", "type": "yarn", "alpha": 1000.0}, {"rope_type": "linear"}),
    "dynamic": ({"rope_type": "dynamic", "alpha": 1000.0}, {"rope_type": "dynamic"}),
    "longrope": (
        {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "short_mscale": 2.0,
         "long_mscale": 3.0},
        {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", READ_ELSEWHERE)
def test_export_writes_no_key_that_another_program_alone_reads(case, tmp_path):
    native, left = READ_ELSEWHERE[case]
    shape = {**tiny_family("llama").config.to_dict(), "dual_chunk_attention_config": {"chunk_size": 8}}
    base = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, ORIGIN: 16}
    config = type(tiny_family("llama").config)(**{**shape, "rope_parameters": {**base, **native}})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    export(model, tmp_path / "out", check=False)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "dual_chunk_attention_config" not in written
    assert written["rope_parameters"] == {**base, **left}
    scaling = {key: value for key, value in written["rope_parameters"].items() if key != "rope_theta"}
    assert written["rope_scaling"] == {**scaling, "type": scaling["rope_type"]}
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), logits(model))


@pytest.mark.parametrize(
    ("card", "edits"), [("DeepSeek-V3", {"mscale": None, "mscale_all_dim": 0.707}), ("Phi-3.5-MoE", {})]
)
def test_export_keeps_the_mscales_that_a_family_reads(card, edits, tmp_path):
    model = built(card, **edits)
    export(model, tmp_path / "out", check=False)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), logits(model))
