"""Position interpolation and dynamic NTK."""

import pytest
from support.rescalings import FACTOR, NATIVE, PAIR, THETA, Case, D, require_refused
from support.tiny import WINDOW, tiny

from rope_patch import describe, patch_model


def _dynamic(seq_len):
    n = max(seq_len, WINDOW)
    return (THETA * (FACTOR * n / WINDOW - (FACTOR - 1)) ** (D / (D - 2))) ** (-2 * PAIR / D), 1.0


CASES = {
    "pi": Case({"factor": FACTOR}, lambda seq_len: (NATIVE / FACTOR, 1.0)),
    "dynamic-ntk": Case({"factor": FACTOR}, _dynamic),
}


def test_views_on_dynamic_ntk_are_refused_both_ways():
    model = patch_model(tiny(), "dynamic-ntk", factor=2.0)
    with pytest.raises(ValueError, match="rope type 'dynamic' chooses its frequencies by the longest sequence"):
        patch_model(model, "skip")
    other = patch_model(tiny(), "skip")
    with pytest.raises(ValueError, match="rope type 'dynamic'"):
        patch_model(other, "dynamic-ntk", factor=2.0)
    assert describe(other).rescaling is None and other.config.rope_parameters["rope_type"] == "default"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"factor": 0}, "rescaling 'pi': factor .* must be a number of at least 1, got 0."),
        ({"factor": -2.0}, "factor .* must be a number of at least 1"),
        ({"factor": "4"}, "factor .* must be a number of at least 1, got '4'."),
        ({"factor": float("nan")}, "factor .* must be a number of at least 1"),
        ({"factor": 2.0**20}, "the target window would be 67108864 positions; at most 16777216"),
    ],
)
def test_what_pi_cannot_do_is_said(options, message):
    require_refused("pi", options, message)
