"""Which parts of a training an engine splits over ranks: weights, gradients, optimizer, rows."""

from dataclasses import dataclass, replace
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch.distributed.fsdp import CPUOffloadPolicy

_DEEPSPEED_BUCKETS = 2 * 500_000_000 * 2
"""Bytes of two buckets of 5e8 numbers of 16 bits, DeepSpeed's default, in which it exchanges weights and gradients."""
_DEEPSPEED_LIVE = 1_000_000_000
"""Weights that ZeRO-3 leaves whole at a time, its default."""

_KEEP_WHOLE = ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2")
"""Strategies of FSDP1 that leave weights whole from forward to backward."""


@dataclass(frozen=True)
class Sharding:
    """Over how many ranks an engine splits each part; 1 keeps it whole on each rank.

    Args:
        weights: of the model.
        gradients: of what is trained.
        optimizer: states of the optimizer.
        teacher: the copy of the model that teaches.
        row: tokens of each row.
        ring: whether the ranks of a row pass keys and values round in a ring.
        live: weights that are whole at a time where they are split; None for two layers, embeddings and head.
        buffers: bytes that the engine holds beside them.
        keeps_weights: whether weights stay on the device between their uses, and not on the host.
        keeps_states: whether gradients and optimizer states do.
    """

    weights: int = 1
    gradients: int = 1
    optimizer: int = 1
    teacher: int = 1
    row: int = 1
    ring: bool = False
    live: int | None = None
    buffers: int = 0
    keeps_weights: bool = True
    keeps_states: bool = True

    @classmethod
    def of_config(cls, name: str, n_gpus: int, ranks_per_row: int | None = None) -> "Sharding":
        """The sharding of one of `launching.config_names`; `ranks_per_row` GPUs share a row, all of them for None."""
        ranks_per_row = (ranks_per_row or n_gpus) if name.endswith(("-cp", "-sp")) else 1
        if name.startswith("fsdp2"):
            return cls._of_fsdp(n_gpus, ranks_per_row)
        return cls._of_zero(int(name[4]) if name.startswith("zero") else 0, n_gpus, ranks_per_row)

    @classmethod
    def of(cls, accelerator: Accelerator) -> "Sharding":
        """The sharding of a trainer's engine."""
        state: Any = accelerator.state
        n_ranks = accelerator.num_processes
        parallelism: Any = getattr(accelerator, "parallelism_config", None)
        ranks_per_row = 1 if parallelism is None else parallelism.cp_size * parallelism.sp_size  # one of them is 1
        if accelerator.distributed_type == DistributedType.DEEPSPEED:
            plugin = state.deepspeed_plugin
            return replace(
                cls._of_zero(plugin.zero_stage, n_ranks, ranks_per_row),
                keeps_weights=_is_kept(plugin, "offload_param"),
                keeps_states=_is_kept(plugin, "offload_optimizer"),
            )
        if accelerator.distributed_type != DistributedType.FSDP:
            return cls(row=ranks_per_row)
        if parallelism is not None:  # FSDP2 splits over both of these, and not over copies of data parallelism
            n_ranks = parallelism.dp_shard_size * parallelism.cp_size
        plugin = state.fsdp_plugin
        sharding = cls._of_fsdp(n_ranks, ranks_per_row)
        strategy = getattr(plugin.reshard_after_forward, "name", "")  # of FSDP1; FSDP2 has a bool there
        if strategy == "NO_SHARD":
            sharding = cls(row=ranks_per_row)
        elif plugin.reshard_after_forward is False or strategy in _KEEP_WHOLE:
            sharding = replace(sharding, weights=1)
        offload = plugin.cpu_offload
        keeps = not (isinstance(offload, CPUOffloadPolicy) or getattr(offload, "offload_params", False))
        return replace(sharding, keeps_weights=keeps, keeps_states=keeps)

    @property
    def runs_in_tiles(self) -> bool:
        """Whether layers may: ZeRO-3 gathers weights once for each call of a module."""
        return self.weights == 1 or self.live is None

    @classmethod
    def _of_fsdp(cls, n_ranks: int, ranks_per_row: int) -> "Sharding":
        return cls(n_ranks, n_ranks, n_ranks, n_ranks, ranks_per_row, ranks_per_row > 1)

    @classmethod
    def _of_zero(cls, stage: int, n_ranks: int, ranks_per_row: int) -> "Sharding":
        if not stage:
            return cls(row=ranks_per_row)
        weights, gradients = (n_ranks if stage >= least else 1 for least in (3, 2))  # states from stage 1 on
        return cls(weights, gradients, n_ranks, row=ranks_per_row, live=_DEEPSPEED_LIVE, buffers=_DEEPSPEED_BUCKETS)


def _is_kept(plugin: Any, part: str) -> bool:
    """Whether DeepSpeed leaves a part on the device."""
    options = plugin.deepspeed_config.get("zero_optimization", {}).get(part) or {}
    return options.get("device", "none") in (None, "none")
