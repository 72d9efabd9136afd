"""Llama 3's rescaling."""

import math

import pytest
import torch
from support.rescalings import FACTOR, NATIVE, NATIVE_2, THETA_2, Case, require_formula
from support.tiny import WINDOW, tiny
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rope_patch import patch_model
from rope_patch.methods import resolve_rescaling


def smoothed(low=1, high=4, origin=WINDOW, native=NATIVE, factor=FACTOR):
    turns = origin * native / (2 * math.pi)
    m = ((turns - low) / (high - low)).clamp(0, 1)
    return lambda seq_len: ((1 - m) * native / factor + m * native, 1.0)


CASES = {"llama3": Case({"factor": FACTOR}, smoothed())}
OPTIONS = {
    "low_freq_factor": (0.5, smoothed(low=0.5), 4 * WINDOW),
    "high_freq_factor": (16, smoothed(high=16), 4 * WINDOW),
    "original_max_position_embeddings": (512, smoothed(origin=512), 4 * 512),
    "rope_theta": (THETA_2, smoothed(native=NATIVE_2), 4 * WINDOW),
    "max_position_embeddings": (1000, smoothed(), 1000),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_off_its_default(option):
    value, expected, window = OPTIONS[option]
    require_formula("llama3", Case({"factor": FACTOR, option: value}, expected), window)


def test_a_large_factor_stops_slow_frequencies_in_the_window_that_is_given():
    options = {"factor": 2.0**20, "max_position_embeddings": 8 * WINDOW}
    require_formula("llama3", Case(options, smoothed(factor=2.0**20)), 8 * WINDOW)
    model = patch_model(tiny(), "llama3", **options)
    # Transformers' own formula, for a config that it alone has read
    parameters = {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 2.0**20, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": WINDOW,
    }  # fmt: skip
    config = LlamaConfig(
        hidden_size=32, num_attention_heads=4, max_position_embeddings=8 * WINDOW, rope_parameters=parameters
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    assert torch.equal(model.model.rotary_emb.inv_freq, frequencies) and factor == 1.0
    # with a window of 64 the two slowest of four pairs turn less than once in it
    turned = 8 * WINDOW * model.model.rotary_emb.inv_freq
    assert (turned[2:] < 1e-3).all() and turned[0] == 8 * WINDOW


def test_a_window_that_is_too_small_is_mended_where_it_was_given():
    given = resolve_rescaling("llama3", {"factor": 4.0, "max_position_embeddings": 128})
    assert given.remedy(128, 300) == "Set rescale_args max_position_embeddings to at least 300"
    assert resolve_rescaling("abf", {"theta": 1e6}).remedy(64, 300) == given.remedy(128, 300)
    assert resolve_rescaling("llama3", {"factor": 4.0}).remedy(256, 300) == "Set factor in rescale_args to at least 5"
