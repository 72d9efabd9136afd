"""What a loss of our own refuses of a trainer: options that lose its gradient or its parts, or split documents."""

from typing import TYPE_CHECKING, Any

from accelerate import Accelerator
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from rope_patch.rotary import find_causal_lm

if TYPE_CHECKING:
    from .trainer import RopeSFTTrainer


def check_objective(trainer: "RopeSFTTrainer") -> None:
    """Raise ValueError if the trainer has what its objective cannot go with; TRL's own loss is not asked."""
    _refuse_what_only_trls_loss_has(trainer)
    _refuse_reentrant_checkpointing(trainer)
    refuse_sharded_sequences(trainer.accelerator, f"{trainer.args.objective!r} relates tokens of whole documents")
    _refuse_short_contexts(trainer)


def sharded_sequences(accelerator: Accelerator) -> str | None:
    """The kind of parallelism, "cp" or "sp", that gives each rank a part of every sequence; None without one."""
    parallelism: Any = getattr(accelerator, "parallelism_config", None)
    return next((kind for kind in ("cp", "sp") if getattr(parallelism, f"{kind}_size", 1) > 1), None)


def refuse_sharded_sequences(accelerator: Accelerator, what: str) -> None:
    """Raise ValueError, which says `what` needs whole documents, if a rank has a part of each sequence alone."""
    kind = sharded_sequences(accelerator)
    if kind is not None:
        raise ValueError(
            f"{what}, and {kind}_size > 1 gives each rank a part of them: not supported yet. Use FSDP2 or DeepSpeed "
            "ZeRO without sequence sharding."
        )


def _refuse_what_only_trls_loss_has(trainer: "RopeSFTTrainer") -> None:
    objective = trainer.args.objective
    if trainer.aux_loss_enabled:
        raise ValueError(
            f"objective {objective!r} leaves out the loss that balances experts, which TRL adds with "
            f"router_aux_loss_coef={trainer.router_aux_loss_coef}: set router_aux_loss_coef=0.0."
        )
    for name in ("compute_loss_func", "compute_metrics"):
        if getattr(trainer, name) is not None:
            raise ValueError(f"{name} is called with logits, and objective {objective!r} makes none: leave it out.")


def _refuse_reentrant_checkpointing(trainer: "RopeSFTTrainer") -> None:
    args = trainer.args
    # Transformers goes by the new name where it has one; what TRL sets for adapters under ZeRO-3 is the old one
    checkpointing: Any = getattr(args, "activation_checkpointing_kwargs", args.gradient_checkpointing_kwargs) or {}
    if not (args.gradient_checkpointing and checkpointing.get("use_reentrant")):
        return
    remedy = "Set gradient_checkpointing_kwargs={'use_reentrant': False}."
    if is_deepspeed_zero3_enabled() and find_causal_lm(trainer.model) is not trainer.model:
        remedy = (
            "TRL sets use_reentrant=True for adapters under ZeRO-3: leave gradient_checkpointing_kwargs out, which "
            "Transformers 5.23 takes for False, set gradient_checkpointing=False, or use FSDP2 or ZeRO-2."
        )
    raise ValueError(
        f"objective {args.objective!r} loses its gradient without an error under reentrant checkpointing. {remedy}"
    )


def _refuse_short_contexts(trainer: "RopeSFTTrainer") -> None:
    if not trainer.args.objective_options.reads_short_contexts:
        return
    if trainer.is_fsdp_enabled or is_deepspeed_zero3_enabled():
        raise ValueError(
            "token_weighting='longce' and kl_longce read as many short windows as the rank's own documents have, and "
            "sharded weights are gathered by all ranks together: use DDP or ZeRO-2, or leave them out."
        )
    if trainer._is_vision_dataset:
        raise ValueError(
            "token_weighting='longce' and kl_longce read short windows of a row's tokens without its images: leave "
            "them out for a dataset with images."
        )
