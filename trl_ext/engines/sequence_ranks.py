"""One sequence over several ranks: ring context parallel (accelerate's "cp") and Ulysses (its "sp", of DeepSpeed)."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from accelerate import Accelerator
from torch import distributed, nn

from rope_patch.forward.state import state_of
from rope_patch.layout.documents import locate_documents
from rope_patch.layout.shards import SequenceShard
from rope_patch.rope.rotary import find_decoder

Engine = Literal["cp", "sp"]

_OF_ROWS = ("input_ids", "labels", "attention_mask", "position_ids")


@dataclass(frozen=True)
class SequenceRanks:
    """The ranks that share each sequence.

    Args:
        accelerator: of the trainer, prepared.
        engine: "cp", whose batches come whole to each rank and are split inside the step, or "sp", whose batches come
            split.
        size: how many they are.
    """

    accelerator: Accelerator
    engine: Engine
    size: int

    @classmethod
    def of(cls, accelerator: Accelerator) -> "SequenceRanks | None":
        """The ranks of a trainer, None if each rank has sequences of its own."""
        parallelism: Any = getattr(accelerator, "parallelism_config", None)
        engines: tuple[Engine, ...] = ("cp", "sp")
        for engine in engines:
            size = getattr(parallelism, f"{engine}_size", 1)
            if size > 1:
                return cls(accelerator, engine, size)
        return None

    @property
    def multiple(self) -> int:
        """Rows must have a multiple of this many tokens; a ring gives each rank two pieces, to balance the work."""
        return 2 * self.size if self.engine == "cp" else self.size

    @property
    def group(self) -> Any:
        """Process group of the ranks that share this rank's sequence."""
        if self.engine == "cp":
            return self.accelerator.torch_device_mesh["cp"].get_group()
        from deepspeed.utils import groups

        return groups._get_sequence_parallel_group()

    def pad_collator(self, collator: Any) -> None:
        """Make TRL's collator pad rows to a length that the ranks can share."""
        known = getattr(collator, "pad_to_multiple_of", None) or 1
        collator.pad_to_multiple_of = math.lcm(known, self.multiple)

    def whole_rows(self, batch: dict[str, Any]) -> dict[str, Any]:
        """A copy of token IDs, labels, mask and positions of whole rows, from a batch of a step.

        A batch of a ring is first padded on the right, in place, to a length that its ranks can share: a view may have
        cut it.

        Raises:
            ValueError: rows of a ring hold several documents, or are padded on the left.
        """
        if self.engine == "sp":
            whole = {}
            for name in (*_OF_ROWS, "shift_labels"):
                if name in batch:
                    part = batch[name].to(self.accelerator.device).contiguous()  # [rows, n / ranks]
                    parts = [torch.empty_like(part) for _ in range(self.size)]
                    distributed.all_gather(parts, part, group=self.group)
                    whole[name] = torch.cat(parts, 1)
            next_labels = whole.pop("shift_labels")
            # DeepSpeed shifts labels before it splits rows; no token predicts the first one
            whole["labels"] = torch.nn.functional.pad(next_labels[:, :-1], (1, 0), value=-100)
            return whole
        rows, n = batch["input_ids"].shape
        missing = -n % self.multiple  # tokens of padding on the right
        if missing:
            # a user's collator may make none
            batch.setdefault("attention_mask", torch.ones_like(batch["input_ids"]))
            for name, value in list(batch.items()):
                if isinstance(value, torch.Tensor) and value.shape == (rows, n):
                    fill = -100 if name == "labels" else 0
                    batch[name] = torch.nn.functional.pad(value, (0, missing), value=fill)
        ids, mask = batch["input_ids"], batch.get("attention_mask")
        documents = locate_documents(rows, ids.shape[1], ids.device, batch.get("position_ids"), mask)
        # accelerate's ring drops every mask and attends causally
        if int(documents.ordinal.max()) + 1 > rows:
            raise ValueError(
                "a ring of ranks (cp_size) attends causally over whole rows, and these hold several documents, which "
                "would see each other: switch packing and padding_free off, or take Ulysses (sp_size) with flash "
                "attention."
            )
        if mask is not None and bool((mask[:, :-1] < mask[:, 1:]).any()):  # a 0 before a 1
            raise ValueError(
                "a ring of ranks (cp_size) attends causally over whole rows, and these are padded on the left, where "
                "tokens would see the padding: pad on the right."
            )
        # clones, as the ring cuts the batch's own tensors in place
        return {name: batch[name].clone() for name in _OF_ROWS if name in batch}

    def ring_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """A batch for the ring, with the index of each token in its row as `position_ids`."""
        rows, n = inputs["input_ids"].shape
        # split like the tokens, they tell `shard` which of them the rank holds
        places = torch.arange(n, device=inputs["input_ids"].device).repeat(rows, 1)
        return {**inputs, "position_ids": places}

    def shard(self, whole: dict[str, Any], inputs: dict[str, Any]) -> SequenceShard:
        """Which tokens of whole rows the rank holds.

        Args:
            whole: of `whole_rows`.
            inputs: the rank's part of the batch, as the model gets it.
        """
        if self.engine == "cp":
            index = inputs["position_ids"][0]  # of `ring_inputs`, split by now; a ring's pieces lie apart
        else:
            m = inputs["input_ids"].shape[1]  # Ulysses gives rank r tokens r m to r m + m - 1
            index = torch.arange(m, device=inputs["input_ids"].device) + m * distributed.get_rank(self.group)
        rows = {name: whole[name].to(index.device) for name in _OF_ROWS if name in whole}
        return SequenceShard(rows, index.clone(), self.group)

    @contextmanager
    def shard_in_force(self, model: nn.Module, whole: dict[str, Any], inputs: dict[str, Any]) -> Iterator[None]:
        """Tell forwards of a patched model inside the block which tokens of whole rows they get, by `shard`."""
        state = state_of(find_decoder(model))
        assert state is not None
        state.shard = self.shard(whole, inputs)
        try:
            yield
        finally:
            state.shard = None

    def sampler_order(self, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The numbers of a step's micro-batches, each once, in the order in which a single rank would read them.

        Args:
            numbers: [ranks, micro-steps], alike on the ranks of a sequence.

        Returns:
            The numbers, [groups * micro-steps], and where among them are those of this rank's micro-batches.
        """
        by_group = numbers[:: self.size]  # [groups, micro-steps]
        n_groups, n_micro = by_group.shape
        micro, group = torch.arange(n_micro)[None], torch.arange(n_groups)[:, None]
        if self.engine == "sp":  # in `size` micro-steps the group runs the batches that each of its ranks has read
            turn, within = micro // self.size, micro % self.size
            place = (turn * n_groups + group) * self.size + within
        else:
            place = micro * n_groups + group
        order = place.flatten().argsort()
        # the inverse of `order`: place of each number in the result
        rank = torch.empty_like(order)
        rank[order] = torch.arange(len(order))
        mine = rank.view(n_groups, n_micro)[self.accelerator.process_index // self.size]
        return by_group.flatten()[order], mine

    def gather_of_rings(self, values: torch.Tensor) -> torch.Tensor:
        """Gather values of documents, [documents], the same on the ranks of a ring, into [documents of all rings].

        Replaces accelerate's `gather_for_metrics`, which assumes that each rank has documents of its own. Leaves out
        documents that were repeated to fill the last batches.
        """
        numbers: torch.Tensor = self.accelerator.gather(values)  # [ranks * documents]
        by_ring = numbers.view(-1, self.size, len(values))[:, 0].flatten()
        state = self.accelerator.gradient_state
        # `remainder` of the last rows are not repeated ones; -1 where accelerate does not know
        return by_ring[: state.remainder] if state.end_of_dataloader and state.remainder > 0 else by_ring

    def sum_over(self, value: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks of a sequence, without gradient."""
        total = value.detach().clone()
        distributed.all_reduce(total, group=self.group)
        return total


def gradient_factor(accelerator: Accelerator, *, over_all_ranks: bool) -> float:
    """The factor of a rank's part of a loss before backward, as engines average gradients and do not sum them.

    Args:
        accelerator: of the trainer.
        over_all_ranks: whether the loss was divided by counts of all ranks (`average_tokens_across_devices`), or by
            those of the rank's own sequence.
    """
    ranks = SequenceRanks.of(accelerator)
    n_ranks, n_sharing = accelerator.num_processes, 1 if ranks is None else ranks.size
    divided_by = n_ranks
    if ranks is not None and ranks.engine == "sp":
        # DeepSpeed 0.19 divides gradients by all ranks in ZeRO-3's reduce_scatter, else by the number of sequences
        zero = accelerator.deepspeed_plugin.deepspeed_config.get("zero_optimization", {})
        if not (zero.get("stage") == 3 and zero.get("reduce_scatter", True)):
            divided_by //= n_sharing
    # a mean over n_ranks / n_sharing sequences, where each was divided by its own counts
    return divided_by * (1.0 if over_all_ranks else n_sharing / n_ranks)
