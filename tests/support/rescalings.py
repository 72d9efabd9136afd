"""What the test file of a rescaling starts from: its case, and the check of what it refuses."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from rope_patch import patch_model

from .tiny import tiny, tokens

# of the tiny models: RoPE base, rotated features, and the factor to stretch by
THETA, D, FACTOR = 10000.0, 8, 4.0
PAIR = torch.arange(D // 2, dtype=torch.float64)
NATIVE = THETA ** (-2 * PAIR / D)  # radians per position
L = 40


@dataclass(frozen=True)
class Case:
    """Options of a rescaling and its formula written out once more.

    Args:
        options: of `patch_model`.
        expected: tokens of a row -> frequencies [D / 2] in float64, in radians per position; the factor of cos and sin.
    """

    options: dict[str, Any]
    expected: Callable[[int], tuple[torch.Tensor, float]]


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
