"""The micro-batches of an optimizer step: numbering their documents over all ranks, and counts that divide losses."""

from typing import Any

import torch
from accelerate import Accelerator
from transformers import TrainerState

from rope_patch.layout.documents import count_documents

from ..config import RopeSFTConfig
from ..data.cut_rows import cut_rows
from ..engines.sequence_ranks import SequenceRanks
from .view import TrainerView

FIRST_SAMPLE = "rope_first_sample"
"""In a batch of training: the ordinal of its first document within the optimizer step."""
WHOLE_ROWS = "rope_whole_rows"
"""In a batch of training whose rows several ranks share: the whole rows."""


def number_documents(
    batches: list[dict[str, Any]], accelerator: Accelerator, device: torch.device, ranks: SequenceRanks | None
) -> tuple[list[int], int]:
    """The number of documents, over all ranks, before each batch, and their total.

    Args:
        batches: of whole rows.
        accelerator: of the trainer.
        device: for talking to other ranks.
        ranks: those that share the rows.
    """
    counts = torch.tensor([[count_documents(batch) for batch in batches]], device=device)
    counts = accelerator.gather(counts).cpu()  # [ranks, micro-steps]
    ranks = ranks or SequenceRanks(accelerator, "cp", 1)  # each rank by itself
    in_order, mine = ranks.sampler_order(counts)
    before = in_order.cumsum(0) - in_order  # [all micro-batches of the step]
    return before[mine].tolist(), int(in_order.sum())


def require_borders(batches: list[dict[str, Any]], args: RopeSFTConfig) -> None:
    """Raise ValueError if rows hold several documents, and a user's collator has dropped where they begin."""
    packs_documents = args.packing and args.packing_strategy != "wrapped"
    for batch in batches if packs_documents or args.padding_free else ():
        if "position_ids" not in batch:
            raise ValueError(
                "data_collator must keep position_ids when rows hold several documents: without them views would cross "
                f"document borders. Got a batch with {sorted(batch)}. Use TRL's own collator."
            )


def cut_documents(batches: list[dict[str, Any]], trainer_view: TrainerView, state: TrainerState) -> bool:
    """Cut long documents to the part that the view keeps, in place; returns whether there were any."""
    assert trainer_view.source is not None
    view = trainer_view.source.view
    if view.cuts is None:
        return False
    if any("position_ids" in batch for batch in batches):
        raise ValueError(
            f"view {view.name!r} with {view.cuts} cuts one document a row: switch packing and padding_free off, or "
            f"leave out {view.cuts} and give shorter documents."
        )
    any_cut = False
    for batch in batches:
        trainer_view.set_clock(state, batch[FIRST_SAMPLE])
        # with the key of the forward, which draws for what is left
        any_cut |= cut_rows(view, batch, trainer_view.key(batch))
    return any_cut


def total_counts(
    counts: list[dict[str, int]],
    accelerator: Accelerator,
    device: torch.device,
    ranks: SequenceRanks | None,
    *,
    over_all_ranks: bool,
) -> dict[str, int]:
    """The divisors of the summed losses of an optimizer step, at least 1 each.

    Args:
        counts: of each micro-batch, of whole rows.
        accelerator: of the trainer.
        device: for talking to other ranks.
        ranks: those that share the rows.
        over_all_ranks: whether losses are divided by counts of all ranks (`average_tokens_across_devices`).
    """
    names = list(counts[0])
    own_counts = torch.tensor([sum(count[name] for count in counts) for name in names], device=device)  # [names]
    totals = accelerator.reduce(own_counts, reduction="sum")
    if ranks is not None:  # ranks that share rows have each counted them whole
        totals = totals // ranks.size
    divisors = totals if over_all_ranks else own_counts
    # where a count is 0, so is the sum
    return dict(zip(names, divisors.clamp(min=1).tolist(), strict=True))
