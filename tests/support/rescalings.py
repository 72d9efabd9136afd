"""What the test file of a rescaling starts from: its case, and the checks of its formula and of what it refuses."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from rope_patch import patch_model

from .tiny import WINDOW, tiny, tokens

# of the tiny models: RoPE base, rotated features, and the factor to stretch by
THETA, D, FACTOR = 10000.0, 8, 4.0
PAIR = torch.arange(D // 2, dtype=torch.float64)
NATIVE = THETA ** (-2 * PAIR / D)  # radians per position
THETA_2 = 5e5  # another base
NATIVE_2 = THETA_2 ** (-2 * PAIR / D)
L = 40


@dataclass(frozen=True)
class Case:
    """Options of a rescaling and its formula written out once more.

    Args:
        options: of `patch_model`.
        expected: tokens of a row -> frequencies [D / 2] in float64, in radians per position; the factor of cos and sin.
        query_scale: positions -> factors of their queries, if they are scaled.
    """

    options: dict[str, Any]
    expected: Callable[[int], tuple[torch.Tensor, float]]
    query_scale: Callable[[torch.Tensor], torch.Tensor] = torch.ones_like


def require_formula(method: str, case: Case, window: int) -> None:
    """That frequencies within the trained window and beyond it, their factor and the window written are the case's."""
    model = patch_model(tiny(), method, **case.options)
    rotary = model.model.rotary_emb
    for seq_len in (L, WINDOW + 20):
        model(tokens(1, seq_len))
        frequencies, factor = case.expected(seq_len)
        torch.testing.assert_close(rotary.inv_freq.double(), frequencies, rtol=1e-6, atol=0)
        assert rotary.attention_scaling == pytest.approx(factor)
    assert model.config.max_position_embeddings == window


def require_refused(method: Any, options: dict[str, Any], message: str) -> None:
    """That a patch raises ValueError, and leaves the model as it was."""
    model = tiny()
    before, keys = model.config.to_dict(), set(vars(model.model))
    ids = tokens(1, L)
    plain = model(ids).logits
    with pytest.raises(ValueError, match=message):
        patch_model(model, method, **options)
    assert model.config.to_dict() == before and set(vars(model.model)) == keys
    assert not model.model._forward_pre_hooks
    assert torch.equal(model(ids).logits, plain)
