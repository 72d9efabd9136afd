"""Whether two ways of running a model differ by rounding alone."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

SAMPLES = 16
"""Outputs to compare: rounding moves single ones by ten times more than others."""
_TIMES = 2.0
_LEAST, _MOST = 1e-4, 0.5  # of the spread of a plain forward's outputs
_STEPS = 4  # of the dtype's last digit, as far as one way may be off where the other is not
_ODD = 2654435761  # Knuth's multiplier: the top bit of its multiples is 0 and 1 in no order


def differs_by_rounding(found: torch.Tensor, plain: torch.Tensor, known: torch.Tensor) -> bool:
    """Whether `found` is as near to `plain` as `known` is, which is right and rounds otherwise.

    In 16 bits no bound holds for all models: tokens in no order moved logits of Gemma-3-270M by 8 percent from one
    right way to another on a CPU, in geometric mean, by 12 where embeddings had been rounded otherwise, and those of
    SmolLM2-135M by 4 and 6. One misplaced token moved them by 72 to 124 and by 26 to 34 percent, 4 to 10 times as far,
    so twice as far is the bound. Half of how far outputs are spread is another one: what moves them further in every
    way reads parts of a prompt in its own manner.

    Args:
        found: outputs of the way in question, [n, d].
        plain: of a plain forward.
        known: of another way that is right, such as the model's own cache.
    """
    least = max(_LEAST, _STEPS * torch.finfo(plain.dtype).eps)
    found, plain, known = (x.float() for x in (found, plain, known))
    spread = (plain - plain.mean(-1, keepdim=True)).norm(dim=-1).clamp(min=1e-12)
    far, near = (((x - plain).norm(dim=-1) / spread).clamp(min=least).log().mean() for x in (found, known))
    return bool(far <= near + math.log(_TIMES) and far <= math.log(_MOST))


@contextmanager
def inputs_rounded_otherwise(causal_lm: Any) -> Iterator[None]:
    """Embeddings x (1 +- u), the sign in no order, with u = eps / 2, as far as rounding moves a number of the dtype.

    How far a model's outputs move then is how much it makes of rounding, whatever its kernels are.
    """

    def move(module: Any, args: Any, embedded: torch.Tensor) -> torch.Tensor:
        place = torch.arange(embedded.numel(), device=embedded.device).view(embedded.shape)
        sign = 1 - 2 * (place * _ODD % 2**32 >= 2**31).to(embedded.dtype)
        return embedded + embedded * sign * (torch.finfo(embedded.dtype).eps / 2)

    handle = causal_lm.get_input_embeddings().register_forward_hook(move)
    try:
        yield
    finally:
        handle.remove()
