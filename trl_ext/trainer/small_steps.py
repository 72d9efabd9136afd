"""A warning for weights in a dtype that rounds training steps away."""

import torch
from torch import nn
from transformers.utils import logging

logger = logging.get_logger(__name__)

_SAMPLE = 4096  # weights of each parameter that are checked
_TOLERATED = 0.1


def lost_share(parameter: torch.Tensor, step: float) -> float:
    """Share of weights that `step` does not change, as it is less than half of the dtype's spacing there.

    Of bfloat16 weights with a standard deviation of 0.02, 70 % are lost to a step of 2e-5 and none to one of 1e-3.

    Args:
        parameter: of any shape, with at least one element.
        step: above 0. AdamW's steps are about the learning rate.
    """
    flat = parameter.detach().flatten()
    flat = flat[:: max(1, flat.numel() // _SAMPLE)]
    # as an optimizer does: the sum is rounded to the dtype of the weights once
    return (((flat.double() + step).to(flat.dtype)) == flat).double().mean().item()


def warn_of_lost_steps(model: nn.Module, learning_rate: float) -> None:
    """Warn if more than a tenth of the trained weights would not move: nothing else would show it."""
    trained = [p for p in model.parameters() if p.requires_grad and p.numel() and not p.is_meta]
    halves = [p for p in trained if p.dtype in (torch.bfloat16, torch.float16)]
    if not halves or not learning_rate > 0:
        return
    lost = sum(lost_share(p, learning_rate) * p.numel() for p in halves) / sum(p.numel() for p in halves)
    if lost > _TOLERATED:
        name = str(halves[0].dtype).removeprefix("torch.")
        logger.warning(
            f"{lost:.0%} of the trained weights in {name} are too large to be moved by one step at learning_rate="
            f"{learning_rate:g}: {name} rounds it away. Load the model in float32 (model_init_kwargs={{'dtype': "
            "'float32'}; forward and backward still run in bfloat16 with bf16=True), or raise learning_rate."
        )
