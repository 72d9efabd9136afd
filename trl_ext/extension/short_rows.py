"""Join short rows of an optimizer step into batches with the tokens of a long row."""

from collections.abc import Iterator
from typing import Any

import torch

from ..trainer.step_batches import FIRST_SAMPLE
from ..trainer.trainer import RopeSFTTrainer


class ShortRowsTrainer(RopeSFTTrainer):
    """A `RopeSFTTrainer` on one process that joins batches of one row each within an optimizer step.

    Neighbours of the same length are joined, up to `max_length` tokens: they need no padding, and no more memory than
    the longest row. Order, draws of the view and divisors of losses stay those of the whole step, and so do gradients.
    Batches stay apart if the loss is a mean over each batch: for a model that takes no `num_items_in_batch`, and for
    the loss of a router.
    """

    def get_batch_samples(
        self, epoch_iterator: Iterator[dict[str, Any]], num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, Any]], Any]:
        """The joined batches of an optimizer step, after empty ones that keep their number.

        Trainer steps the optimizer after a fixed number of batches.
        """
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if num_items is None or (self._objective is None and getattr(self, "aux_loss_enabled", False)):
            return batches, num_items
        joined = join(batches, self.args.max_length or 0)
        self._batches_left = len(joined)
        # the last one must be real: Trainer steps after it
        return [{} for _ in batches[len(joined) :]] + joined, num_items

    def training_step(self, model: torch.nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        """A step of `RopeSFTTrainer`; nothing for an empty batch."""
        if not inputs:
            return torch.zeros((), device=self.args.device)
        return super().training_step(model, inputs, *args, **kwargs)


def join(batches: list[dict[str, Any]], tokens: int) -> list[dict[str, Any]]:
    """Join neighbouring batches of the same shape, up to `tokens` tokens each; the order of rows stays.

    A batch with several documents in a row stays alone, as its documents are not counted by rows.
    """
    groups: list[list[dict[str, Any]]] = []
    for batch in batches:
        before = groups[-1] if groups else []
        if before and _alike(before[0], batch) and (len(before) + 1) * batch["input_ids"].numel() <= tokens:
            before.append(batch)
        else:
            groups.append([batch])
    return [_joined(group) for group in groups]


def _joined(group: list[dict[str, Any]]) -> dict[str, Any]:
    if len(group) == 1:
        return group[0]
    return {
        # the ordinal of the first document is that of the group, as the order stays
        name: value if name == FIRST_SAMPLE else torch.cat([batch[name] for batch in group])
        for name, value in group[0].items()
    }


def _alike(one: dict[str, Any], other: dict[str, Any]) -> bool:
    if one.keys() != other.keys() or "position_ids" in one:
        return False
    # numbers such as FIRST_SAMPLE have no shape
    return all(getattr(one[name], "shape", None) == getattr(other[name], "shape", None) for name in one)


def batches_a_step(rows: int, short: float, most: int) -> float:
    """The average number of batches of an optimizer step whose rows are in random order.

    With r rows, a share s of them short, a run of short rows begins at the first row with chance s, and at each other
    one with s (1 - s), behind a long one. A run makes a batch, or more where it is longer than `most` rows.

    Args:
        rows: r, in a step.
        short: s, from 0 to 1.
        most: short rows in a batch, at most.
    """
    runs = short + (rows - 1) * short * (1 - short)
    return (1 - short) * rows + max(runs, short * rows / most)
