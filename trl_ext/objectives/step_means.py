"""Means for the log: sums over all batches and ranks of an optimizer step, divided by their counts once."""

import torch
from accelerate import Accelerator

Part = tuple[torch.Tensor, torch.Tensor | float]
"""The sum of a quantity over a batch, and its count: scalars."""


class StepMeans:
    """Sums and counts by name, until their means are taken.

    A mean over batches' means would weigh a short batch like a long one, and differ from the loss.

    Args:
        accelerator: of the trainer.
        ranks_alike: whether the loss is the mean of the ranks' means, so that each rank has the same weight.
    """

    def __init__(self, accelerator: Accelerator, *, ranks_alike: bool) -> None:
        self.accelerator, self.ranks_alike = accelerator, ranks_alike
        self._sums: dict[str, torch.Tensor] = {}  # [2] float64 each: sum, count

    def add(self, parts: dict[str, Part]) -> None:
        """Add a batch. All ranks give the same names in the same order."""
        for name, (total, count) in parts.items():
            total = total.detach().double()
            # filled on the GPU: copying a number there would synchronize
            counted = count.to(total) if isinstance(count, torch.Tensor) else torch.full_like(total, count)
            sum_and_count = torch.stack([total, counted])
            self._sums[name] = self._sums[name] + sum_and_count if name in self._sums else sum_and_count

    def take(self) -> dict[str, float]:
        """Return the mean of each quantity over all ranks, and start anew.

        A quantity with a count of 0 is left out; a sum that is nan gives nan.
        """
        if not self._sums:
            return {}
        names, sums = list(self._sums), torch.stack(list(self._sums.values()))  # [names, 2]
        self._sums = {}
        if self.ranks_alike:
            # mean and 1 in place of sum and count, so that a rank with more labels has no more weight; 0 and 0 stay
            sums = torch.where(
                sums[:, 1:] > 0, torch.stack([sums[:, 0] / sums[:, 1], torch.ones_like(sums[:, 1])], 1), 0.0
            )
        sums = self.accelerator.reduce(sums, reduction="sum")
        return {name: total / count for name, (total, count) in zip(names, sums.tolist(), strict=True) if count}
