"""NTK and ABF: another base."""

import pytest
from support.rescalings import FACTOR, PAIR, THETA, Case, D, require_refused
from support.tiny import tiny

from rope_patch import patch_model

CASES = {
    "ntk": Case({"factor": FACTOR}, lambda seq_len: ((THETA * FACTOR ** (D / (D - 2))) ** (-2 * PAIR / D), 1.0)),
    "abf": Case({"theta": 5e5}, lambda seq_len: (5e5 ** (-2 * PAIR / D), 1.0)),
}


def test_ntk_has_no_exponent_for_a_single_frequency():
    model = tiny("llama", hidden_size=8, head_dim=2)
    with pytest.raises(
        ValueError, match="rescaling 'ntk' needs 2 frequencies or more, and this model rotates 2 features"
    ):
        patch_model(model, "ntk", factor=2.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"theta": 0}, "rescaling 'abf': theta must be a finite number above 1, got 0."),
        ({"theta": 1e6, "max_position_embeddings": 1.5}, "max_position_embeddings must be an integer"),
    ],
)
def test_what_abf_cannot_do_is_said(options, message):
    require_refused("abf", options, message)
