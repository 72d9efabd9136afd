"""CoPE: the slowest pairs fade to 0."""

import math

import pytest
import torch
from support.rescalings import FACTOR, NATIVE, Case, require_formula
from support.tiny import WINDOW, tiny

from rope_patch import patch_model

FADED = NATIVE * torch.tensor([1.0, *(0.5 * (1 + math.cos(math.pi * i / 2)) for i in range(3))], dtype=torch.float64)
CASES = {"cope": Case({"n": 3}, lambda seq_len: (FADED, 1.0))}


def test_the_window_is_an_option():
    window = round(FACTOR * WINDOW)
    require_formula("cope", Case({"n": 3, "max_position_embeddings": window}, CASES["cope"].expected), window)


@pytest.mark.parametrize(
    ("n", "message"),
    [
        (1, "n must be an integer of at least 2, got 1"),
        (5, "n, for this model, must be an integer of at most 4, got 5"),
    ],
)
def test_a_number_of_pairs_that_cannot_be(n, message):
    with pytest.raises(ValueError, match=f"rescaling 'cope': {message}"):
        patch_model(tiny(), "cope", n=n)
