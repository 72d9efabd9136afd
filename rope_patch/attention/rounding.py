"""Whether two ways of running a model differ only by rounding."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

SAMPLES = 16
"""Outputs to compare: rounding moves some ten times as far as others."""
_TIMES = 2.0
_LEAST, _MOST = 1e-4, 0.5  # relative to the spread of a plain forward's outputs
_STEPS = 4  # units of the dtype's last digit by which one way may be off when the other is exact
_ODD = 2654435761  # Knuth's multiplier: the top bits of its multiples look random


def differs_by_rounding(found: torch.Tensor, plain: torch.Tensor, known: torch.Tensor) -> bool:
    """Whether `found` is about as close to `plain` as `known` is, which is correct but rounded differently.

    In 16 bits no fixed bound holds for all models. For random tokens on a CPU, two correct ways moved the logits of
    Gemma-3-270M by 8 percent in geometric mean, and different rounding of embeddings by 12; for SmolLM2-135M, by 4 and
    6. One misplaced token moved them by 72 to 124 and by 26 to 34 percent, which is 4 to 10 times as far. The bound is
    therefore twice the distance of `known`. A second bound is half of the outputs' spread: a model in which even
    `known` is further away reads parts of a prompt in another way.

    Args:
        found: outputs to check, [n, d].
        plain: outputs of a plain forward, [n, d].
        known: outputs of another correct way, such as the model's cache, [n, d].
    """
    least = max(_LEAST, _STEPS * torch.finfo(plain.dtype).eps)
    found, plain, known = (x.float() for x in (found, plain, known))
    spread = (plain - plain.mean(-1, keepdim=True)).norm(dim=-1).clamp(min=1e-12)  # [n]
    # logs of the geometric means over n; the clamp keeps an exact output from making a mean 0
    far, near = (((x - plain).norm(dim=-1) / spread).clamp(min=least).log().mean() for x in (found, known))
    return bool(far <= near + math.log(_TIMES) and far <= math.log(_MOST))


@contextmanager
def inputs_rounded_otherwise(causal_lm: Any) -> Iterator[None]:
    """Multiply embeddings by 1 +- eps / 2 with pseudorandom signs, which is how far rounding moves them.

    How far the outputs move then shows how sensitive the model is to rounding.
    """

    def move(module: Any, args: Any, embedded: torch.Tensor) -> torch.Tensor:
        place = torch.arange(embedded.numel(), device=embedded.device).view(embedded.shape)  # [batch, n, hidden]
        sign = 1 - 2 * (place * _ODD % 2**32 >= 2**31).to(embedded.dtype)  # 1 or -1, by the top bit
        return embedded + embedded * sign * (torch.finfo(embedded.dtype).eps / 2)

    handle = causal_lm.get_input_embeddings().register_forward_hook(move)
    try:
        yield
    finally:
        handle.remove()
