"""Position interpolation and dynamic NTK."""

import pytest
from support.rescalings import FACTOR, NATIVE, NATIVE_2, PAIR, THETA, THETA_2, Case, D, require_formula
from support.tiny import WINDOW, tiny

from rope_patch import describe, patch_model


def interpolated(native=NATIVE):
    return lambda seq_len: (native / FACTOR, 1.0)


def dynamic(theta=THETA):
    def expected(seq_len):
        n = max(seq_len, WINDOW)
        return (theta * (FACTOR * n / WINDOW - (FACTOR - 1)) ** (D / (D - 2))) ** (-2 * PAIR / D), 1.0

    return expected


CASES = {"pi": Case({"factor": FACTOR}, interpolated()), "dynamic-ntk": Case({"factor": FACTOR}, dynamic())}


@pytest.mark.parametrize(
    ("method", "expected", "window"),
    [("pi", interpolated(NATIVE_2), 4 * WINDOW), ("dynamic-ntk", dynamic(THETA_2), WINDOW)],
)
def test_another_base(method, expected, window):
    require_formula(method, Case({"factor": FACTOR, "rope_theta": THETA_2}, expected), window)


def test_views_on_dynamic_ntk_are_refused_both_ways():
    model = patch_model(tiny(), "dynamic-ntk", factor=2.0)
    with pytest.raises(ValueError, match="rope type 'dynamic' chooses its frequencies by the longest sequence"):
        patch_model(model, "skip")
    other = patch_model(tiny(), "skip")
    with pytest.raises(ValueError, match="rope type 'dynamic'"):
        patch_model(other, "dynamic-ntk", factor=2.0)
    assert describe(other).rescaling is None and other.config.rope_parameters["rope_type"] == "default"
