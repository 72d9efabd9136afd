"""Llama 3's rescaling."""

import math

import pytest
from support.rescalings import FACTOR, NATIVE, NATIVE_2, THETA_2, Case, require_formula
from support.tiny import WINDOW


def smoothed(low=1, high=4, origin=WINDOW, native=NATIVE):
    turns = origin * native / (2 * math.pi)
    m = ((turns - low) / (high - low)).clamp(0, 1)
    return lambda seq_len: ((1 - m) * native / FACTOR + m * native, 1.0)


CASES = {"llama3": Case({"factor": FACTOR}, smoothed())}
OPTIONS = {
    "low_freq_factor": (0.5, smoothed(low=0.5), 4 * WINDOW),
    "high_freq_factor": (16, smoothed(high=16), 4 * WINDOW),
    "original_max_position_embeddings": (512, smoothed(origin=512), 4 * 512),
    "rope_theta": (THETA_2, smoothed(native=NATIVE_2), 4 * WINDOW),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_off_its_default(option):
    value, expected, window = OPTIONS[option]
    require_formula("llama3", Case({"factor": FACTOR, option: value}, expected), window)
