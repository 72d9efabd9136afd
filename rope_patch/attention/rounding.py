"""Whether two ways of running a model differ by rounding alone."""

import math

import torch

SAMPLES = 16
"""Outputs to compare: rounding moves single ones by ten times more than others."""
_TIMES = 2.0
_LEAST, _MOST = 1e-4, 0.5  # of the spread of a plain forward's outputs
_STEPS = 4  # of the dtype's last digit, as far as one way may be off where the other is not


def differs_by_rounding(found: torch.Tensor, plain: torch.Tensor, known: torch.Tensor) -> bool:
    """Whether `found` is as near to `plain` as `known` is, which is right and rounds otherwise.

    In 16 bits no bound holds for all models: tokens in no order moved logits of Gemma-3-270M by 3 to 58 percent from
    one right way to another, by 22 in geometric mean, and those of SmolLM2-135M by 5. One misplaced token moved them
    3.6 to 7 times as far in that mean, so twice as far is the bound. Half of how far outputs are spread is another one:
    what moves them further in every way reads parts of a prompt in its own manner.

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
