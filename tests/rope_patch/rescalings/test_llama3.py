"""Llama 3's rescaling."""

import math

import pytest
from support.rescalings import FACTOR, NATIVE, Case, require_refused
from support.tiny import WINDOW


def _smoothed(seq_len):
    turns = WINDOW * NATIVE / (2 * math.pi)
    m = ((turns - 1) / (4 - 1)).clamp(0, 1)
    return (1 - m) * NATIVE / FACTOR + m * NATIVE, 1.0


CASES = {"llama3": Case({"factor": FACTOR}, _smoothed)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"factor": 2, "low_freq_factor": 4}, "low_freq_factor must be below high_freq_factor .*, got 4.0 and 4.0."),
    ],
)
def test_what_llama3_cannot_do_is_said(options, message):
    require_refused("llama3", options, message)
