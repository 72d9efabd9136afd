"""What a loss that is not a number, or infinite, leads to."""

import torch
from accelerate import Accelerator
from transformers.utils import logging

logger = logging.get_logger(__name__)


class FiniteLosses:
    """Stops a training whose loss is not finite.

    Args:
        accelerator: of the trainer.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self._overflowed: int | None = None  # the last optimizer step of which that was told

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
                f"{what}: fp16 has overflowed, and the step is left out as loss scaling does. If this goes on, nothing "
                "is trained any more: use bf16 or float32."
            )
            return
        raise FloatingPointError(f"{what}. Lower the learning rate, use float32, or look for bad rows in the dataset.")


def _skips_overflows(accelerator: Accelerator) -> bool:
    """Whether gradients that are not finite are left out by loss scaling, of torch or of DeepSpeed."""
    return accelerator.scaler is not None or accelerator.mixed_precision == "fp16"


def tell_of_evaluation(loss: torch.Tensor | None) -> None:
    """Say so if the loss of an evaluation batch is not finite."""
    if loss is not None and not torch.isfinite(loss).all():
        logger.error(  # also on ranks that say errors alone: others may have none
            f"the loss of an evaluation batch is {loss.mean().item()}, and Trainer may leave it out of its mean: "
            "the weights are not finite, or none of the batch's tokens has a label."
        )
