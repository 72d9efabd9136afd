"""LongRoPE: frequencies inside and beyond the native window, what is refused."""

import math

import pytest
import torch
from support.rescalings import FACTOR, NATIVE, NATIVE_2, THETA_2, Case, L, require_formula
from support.tiny import WINDOW, tiny, tokens
from transformers import Phi3Config, Phi3ForCausalLM

from rope_patch import patch_model, rope_view
from rope_patch.views import Skip

LONG = [1.0, 1.5, 3.0, 4.0]


def divided(short=(1.0, 1.0, 1.0, 1.0), origin=WINDOW, attention=None, native=NATIVE):
    def expected(seq_len):
        divisors = torch.tensor(LONG if seq_len > origin else short, dtype=torch.float64)
        return native / divisors, attention or math.sqrt(1 + math.log(FACTOR) / math.log(origin))

    return expected


CASES = {"longrope": Case({"factor": FACTOR, "long_factor": LONG}, divided())}
SHORT = [1.0, 1.0, 1.1, 1.5]
OPTIONS = {
    "short_factor": (SHORT, divided(short=SHORT), 4 * WINDOW),
    "original_max_position_embeddings": (32, divided(origin=32), 4 * 32),
    "attention_factor": (1.3, divided(attention=1.3), 4 * WINDOW),
    "rope_theta": (THETA_2, divided(native=NATIVE_2), 4 * WINDOW),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_off_its_default(option):
    value, expected, window = OPTIONS[option]
    require_formula("longrope", Case({"factor": FACTOR, "long_factor": LONG, option: value}, expected), window)


@torch.no_grad()
def test_longrope_takes_its_regime_from_the_true_positions():
    model = patch_model(tiny(), "longrope", factor=FACTOR, long_factor=LONG)
    ids = tokens(1, L)
    plain = model(ids).logits
    with rope_view(model, Skip(split=10, skip=3 * WINDOW)):
        seen = model(ids).logits
    torch.testing.assert_close(seen[:, :10], plain[:, :10], rtol=0, atol=1e-5)
    assert torch.equal(model(ids).logits, plain)


def test_a_window_that_the_config_overrules_is_refused():
    """Transformers takes `config.original_max_position_embeddings` of Phi-3, whatever the RoPE parameters say."""
    config = Phi3Config(
        vocab_size=101, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=WINDOW, original_max_position_embeddings=WINDOW, pad_token_id=0,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = Phi3ForCausalLM(config)
    before = model.config.to_dict()
    options = {"factor": 8.0, "long_factor": LONG}
    message = f"must be {WINDOW}, which the config of model type 'phi3' names .* got {WINDOW // 2}. Pass {WINDOW}, or"
    with pytest.raises(ValueError, match=message):
        patch_model(model, "longrope", **options, original_max_position_embeddings=WINDOW // 2)
    assert model.config.to_dict() == before
    for named in ({}, {"original_max_position_embeddings": WINDOW}):
        patch_model(model, "longrope", **options, **named)
        assert model.config.rope_parameters["original_max_position_embeddings"] == WINDOW


def test_a_trained_window_of_one_position_is_refused_as_its_logarithm_is_0():
    with pytest.raises(
        ValueError, match="rescaling 'longrope': Transformers does not accept these RoPE parameters .* zero"
    ):
        patch_model(tiny(max_position_embeddings=1), "longrope", factor=2.0, long_factor=LONG)
