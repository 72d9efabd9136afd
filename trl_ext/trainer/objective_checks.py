"""What a loss of our own refuses of a trainer: options that lose its gradient or its parts, or split documents."""

from typing import TYPE_CHECKING, Any

from torch import nn

from rope_patch.families.attention_calls import attention_name
from rope_patch.families.local_layers import is_local
from rope_patch.rope.rotary import find_causal_lm

from ..engines.sequence_ranks import Engine, SequenceRanks
from ..objectives import objective_of

if TYPE_CHECKING:
    from ..config import RopeSFTConfig
    from .trainer import RopeSFTTrainer

_INSTEAD_OF_SPREADING = (
    "train it in parts by `rope-patch train RECIPE.yaml --accelerate_config fsdp2`, by `accelerate launch` of a "
    "script, or load it with device_map={'': 0}."
)


def check_objective(trainer: "RopeSFTTrainer") -> None:
    """Raise ValueError if the trainer has what its objective cannot go with; TRL's own loss is not asked."""
    _refuse_what_only_trls_loss_has(trainer)
    _refuse_reentrant_checkpointing(trainer)
    _refuse_short_contexts(trainer)
    _refuse_spread_models(trainer)


def check_next_token(trainer: "RopeSFTTrainer") -> None:
    """Raise ValueError if TRL's own loss cannot read the output head where `device_map` has put it.

    TRL 1.16 starts its kernel on the process's own GPU: on two H200s a head on the other one made the loss -inf.
    """
    head = find_causal_lm(trainer.model).get_output_embeddings()
    there, here = getattr(getattr(head, "weight", None), "device", None), trainer.args.device
    if there is None or there.type != "cuda" or (there.index or 0) == (here.index or 0):
        return
    raise ValueError(
        f"device_map has put the output head on {there}, and TRL computes the loss on {here}: {_INSTEAD_OF_SPREADING}"
    )


def check_shared_sequences(trainer: "RopeSFTTrainer", ranks: SequenceRanks) -> None:
    """Raise ValueError if a trainer whose ranks share each sequence has what needs whole rows on one rank."""
    reason = "images belong to whole rows" if trainer._is_vision_dataset else None
    reason = reason or why_not_shared(trainer.model, trainer.args, ranks.engine, ranks.size)
    if reason is not None:
        raise ValueError(
            f"{ranks.engine}_size={ranks.size} gives each rank a part of every sequence, and {reason}: leave it out, "
            "or use FSDP2 or DeepSpeed ZeRO with whole sequences on each rank, and long_rows for their memory."
        )


def why_not_shared(model: nn.Module, args: "RopeSFTConfig", engine: Engine, size: int) -> str | None:
    """Why ranks cannot share each sequence of a training, as a clause; None if they can.

    Args:
        model: as it is trained, on any device.
        args: of the trainer.
        engine: by which they would.
        size: how many ranks would share a sequence.
    """
    view = args.make_view()
    options: Any = args.objective_options
    causal_lm = find_causal_lm(model)
    config = causal_lm.config.get_text_config(decoder=True)
    n_heads = getattr(config, "num_attention_heads", 1)
    n_kv_heads = getattr(config, "num_key_value_heads", None) or n_heads
    attends = bool(getattr(options, "attention", 0.0))
    attention = attention_name(causal_lm)
    of_whole_rows = {
        f"objective {args.objective!r} does not say that it can (`shares_sequences`)": not objective_of(
            args
        ).shares_sequences,
        "shifted_attention groups tokens of whole rows": args.shifted_attention is not None,
        "longce and kl_longce read short windows of whole rows": options.reads_short_contexts,
        "kl_top chooses among all rows of a document": getattr(options, "kl_top", None) is not None,
        "a control's noise differs between ranks": getattr(options, "control", None) is not None,
        f"attention=... of objective_args needs {n_heads} and {n_kv_heads} heads to be multiples of that": attends
        and bool(n_heads % size or n_kv_heads % size),
    }
    of_ring = {
        "padding_free rows hold several documents, which a ring does not keep apart": args.padding_free,
        "packed rows hold several documents, which a ring does not keep apart": args.packing
        and args.packing_strategy != "wrapped",
        "layers with sliding windows would attend to all tokens before, as a ring has no masks": _has_local_layers(
            config
        ),
        f"attention is {attention}, where a ring is one of sdpa": attention != "sdpa",
    }
    of_ulysses = {
        "attention with dropout would take a teacher's for an evaluation, which Ulysses does not split": bool(
            getattr(config, "attention_dropout", 0.0)
        ),
        f"view {view.name!r} with {view.cuts} cuts rows, which Ulysses has split before": view.cuts is not None,
    }
    reasons = of_whole_rows | (of_ring if engine == "cp" else of_ulysses)
    return next((reason for reason, applies in reasons.items() if applies), None)


def _has_local_layers(config: Any) -> bool:
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:  # one window for all layers, as Mistral's
        return getattr(config, "sliding_window", None) is not None
    return any(map(is_local, layer_types))


def _refuse_what_only_trls_loss_has(trainer: "RopeSFTTrainer") -> None:
    objective = trainer.args.objective
    if trainer.aux_loss_enabled:
        raise ValueError(
            f"objective {objective!r} leaves out the loss that balances experts, which TRL adds with "
            f"router_aux_loss_coef={trainer.router_aux_loss_coef}: set router_aux_loss_coef=0.0."
        )
    if trainer.compute_loss_func is not None:
        raise ValueError(f"compute_loss_func is a loss, and objective {objective!r} has its own: leave it out.")


def _refuse_reentrant_checkpointing(trainer: "RopeSFTTrainer") -> None:
    args = trainer.args
    # Transformers goes by the new name where it has one; what TRL sets for adapters under ZeRO-3 is the old one
    checkpointing: Any = getattr(args, "activation_checkpointing_kwargs", args.gradient_checkpointing_kwargs) or {}
    if not (args.gradient_checkpointing and checkpointing.get("use_reentrant")):
        return
    if not trainer._asked_reentrant:
        # TRL's doing for adapters under ZeRO-3, whose other checkpointing DeepSpeed once failed at; 0.19.8 does not
        checkpointing["use_reentrant"] = False
        return
    raise ValueError(
        f"objective {args.objective!r} loses its gradient without an error under reentrant checkpointing. Set "
        "gradient_checkpointing_kwargs={'use_reentrant': False}."
    )


def _refuse_short_contexts(trainer: "RopeSFTTrainer") -> None:
    if not trainer.args.objective_options.reads_short_contexts:
        return
    if trainer.is_fsdp_enabled and getattr(trainer.accelerator.state.fsdp_plugin, "fsdp_version", 2) == 1:
        raise ValueError(
            "longce and kl_longce read as many short windows as the rank's own documents have, and "
            "FSDP1 hides that weights are gathered for each: set fsdp_config={'fsdp_version': 2}, or use DDP or "
            "DeepSpeed."
        )
    if trainer._is_vision_dataset:
        raise ValueError(
            "longce and kl_longce read short windows of a row's tokens without its images: leave "
            "them out for a dataset with images."
        )


def _refuse_spread_models(trainer: "RopeSFTTrainer") -> None:
    devices = {str(p.device) for p in trainer.model.parameters() if p.device.type not in ("cpu", "meta")}
    if len(devices) > 1:
        raise ValueError(
            f"objective {trainer.args.objective!r} computes its loss on one GPU, and device_map has spread the model "
            f"over {', '.join(sorted(devices))}: {_INSTEAD_OF_SPREADING}"
        )
