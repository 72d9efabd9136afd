"""Means that are logged: sums and counts of all batches and ranks of an optimizer step, divided once."""

import torch
from accelerate import Accelerator

Part = tuple[torch.Tensor, torch.Tensor | float]
"""The sum of a quantity over what a batch has of it, and how much that is: scalars."""


class StepMeans:
    """Sums and counts by name, until their means are taken.

    A mean of the means of batches would weigh a short batch like a long one, and not be a part of the loss.

    Args:
        accelerator: of the trainer.
        ranks_alike: whether the loss is a mean of the ranks' own means, which weighs them alike whatever they have.
    """

    def __init__(self, accelerator: Accelerator, *, ranks_alike: bool) -> None:
        self.accelerator, self.ranks_alike = accelerator, ranks_alike
        self._sums: dict[str, torch.Tensor] = {}  # [2] float64 each: sum, count

    def add(self, parts: dict[str, Part]) -> None:
        """Add a batch. All ranks give the same names in the same order."""
        for name, (total, count) in parts.items():
            total = total.detach().double()
            # of a number a fill, where a copy to the GPU would wait
            counted = count.to(total) if isinstance(count, torch.Tensor) else torch.full_like(total, count)
            sum_and_count = torch.stack([total, counted])
            self._sums[name] = self._sums[name] + sum_and_count if name in self._sums else sum_and_count

    def take(self) -> dict[str, float]:
        """Mean of each quantity over all ranks, without those that nothing was found of, and start anew.

        A sum that is nan gives a nan: only what has a count of 0 is left out.
        """
        if not self._sums:
            return {}
        names, sums = list(self._sums), torch.stack(list(self._sums.values()))
        self._sums = {}
        if self.ranks_alike:
            sums = torch.where(
                sums[:, 1:] > 0, torch.stack([sums[:, 0] / sums[:, 1], torch.ones_like(sums[:, 1])], 1), 0.0
            )
        sums = self.accelerator.reduce(sums, reduction="sum")
        return {name: total / count for name, (total, count) in zip(names, sums.tolist(), strict=True) if count}
