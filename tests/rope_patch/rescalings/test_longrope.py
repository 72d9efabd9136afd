"""LongRoPE: frequencies inside and beyond the native window, what is refused."""

import math

import pytest
import torch
from support.rescalings import FACTOR, NATIVE, Case, L, require_refused
from support.tiny import WINDOW, tiny, tokens

from rope_patch import patch_model, rope_view
from rope_patch.views import Skip

LONG = [1.0, 1.5, 3.0, 4.0]


def _divided(seq_len):
    divisors = torch.tensor(LONG if seq_len > WINDOW else [1.0] * 4, dtype=torch.float64)
    return NATIVE / divisors, math.sqrt(1 + math.log(FACTOR) / math.log(WINDOW))


CASES = {"longrope": Case({"factor": FACTOR, "long_factor": LONG}, _divided)}


@torch.no_grad()
def test_longrope_takes_its_regime_from_the_true_positions():
    model = patch_model(tiny(), "longrope", factor=FACTOR, long_factor=LONG)
    ids = tokens(1, L)
    plain = model(ids).logits
    with rope_view(model, Skip(split=10, skip=3 * WINDOW)):
        seen = model(ids).logits
    torch.testing.assert_close(seen[:, :10], plain[:, :10], rtol=0, atol=1e-5)
    assert torch.equal(model(ids).logits, plain)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"factor": 2}, "method 'longrope' needs long_factor, got {'factor': 2}"),
        ({"factor": 2, "long_factor": [1.0]}, "one divisor for each of the model's 4 frequencies, got 1."),
        ({"factor": 2, "long_factor": [1, 1, 1, 0]}, "long_factor\\[3\\] must be a finite number above 0"),
    ],
)
def test_what_longrope_cannot_do_is_said(options, message):
    require_refused("longrope", options, message)
