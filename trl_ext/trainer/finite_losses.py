"""Stop a training whose loss, gradient or weights are NaN or infinite."""

import math
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from transformers.utils import logging

logger = logging.get_logger(__name__)

_REMEDY = "Lower the learning rate, use float32, or look for bad rows in the dataset."


class FiniteLosses:
    """Stops a training whose loss or gradient is not finite.

    Args:
        accelerator: of the trainer.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self._overflowed: int | None = None  # the last optimizer step that was warned of

    def require(self, loss: torch.Tensor, step: int) -> None:
        """Raise FloatingPointError for a training loss that is not finite, unless loss scaling leaves the step out."""
        if torch.isfinite(loss):
            return
        what = f"the loss became {loss.item()} at optimizer step {step}"
        if _skips_overflows(self.accelerator):
            if self._overflowed == step:
                return
            self._overflowed = step
            logger.warning(
                f"{what}: fp16 has overflowed, and loss scaling skips the step. If this goes on, nothing is "
                "trained any more: use bf16 or float32."
            )
            return
        raise FloatingPointError(f"{what}. {_REMEDY}")

    def require_gradient(self, norm: Any, step: int) -> None:
        """Raise FloatingPointError for a norm of gradients that is not finite, unless loss scaling leaves the step out.

        Called before the optimizer's step; DeepSpeed has taken its own by then, of which nothing is saved.

        Args:
            norm: a number or a scalar tensor; None where DeepSpeed gives none.
            step: of the optimizer.
        """
        if norm is None or math.isfinite(norm) or _skips_overflows(self.accelerator):
            return
        raise FloatingPointError(
            f"the norm of the gradients became {float(norm)} at optimizer step {step}, with a finite loss. {_REMEDY}"
        )


def require_finite_weights(model: nn.Module) -> None:
    """Raise FloatingPointError if a weight that is trained is not finite, before it is saved.

    Each rank checks its own part of weights that an engine splits over ranks.
    """
    finite = {}
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            part = getattr(weight, "ds_tensor", weight).detach()  # of ZeRO-3
            part = part.to_local() if hasattr(part, "to_local") else part  # of FSDP2
            finite[name] = torch.isfinite(part).all()
    broken = [name for name, is_finite in finite.items() if not is_finite]  # waits for the GPU once all are under way
    if broken:
        raise FloatingPointError(
            f"{len(broken)} of {len(finite)} trained weights hold numbers that are not finite, {broken[0]} first, and "
            f"are not saved; earlier checkpoints stay. {_REMEDY}"
        )


def _skips_overflows(accelerator: Accelerator) -> bool:
    """Whether loss scaling, of torch or DeepSpeed, skips steps with gradients that are not finite."""
    return accelerator.scaler is not None or accelerator.mixed_precision == "fp16"


def log_broken_evaluation(loss: torch.Tensor | None) -> None:
    """Log an error if the loss of an evaluation batch is not finite."""
    if loss is not None and not torch.isfinite(loss).all():
        logger.error(  # an error is logged on every rank: the first may not have the batch
            f"the loss of an evaluation batch is {loss.mean().item()}, and Trainer may leave it out of its mean: "
            "the weights are not finite, or none of the batch's tokens has a label."
        )
