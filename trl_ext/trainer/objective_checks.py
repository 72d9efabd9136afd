"""Whether a trainer's objective works with its other options, engine and devices; checked before training."""

from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from torch import nn

from rope_patch.families.attention_calls import attention_name
from rope_patch.families.local_layers import is_local
from rope_patch.rope.rotary import find_causal_lm

from ..engines.sequence_ranks import Engine, SequenceRanks
from ..objectives import objective_of

if TYPE_CHECKING:
    from ..config import RopeSFTConfig

_INSTEAD_OF_SPREADING = (
    "train it in parts by `rope-patch train RECIPE.yaml --accelerate-config fsdp2`, by `accelerate launch` of a "
    "script, or load it with device_map={'': 0}."
)


def check_objective(
    model: nn.Module,
    args: "RopeSFTConfig",
    accelerator: Accelerator,
    *,
    compute_loss_func: Any,
    aux_loss_coef: float,
    has_images: bool,
) -> None:
    """Raise ValueError if an objective other than TRL's own loss does not work with the rest of a training.

    Args:
        model: patched.
        args: of the trainer.
        accelerator: of the trainer.
        compute_loss_func: a loss that the user gave, None without one.
        aux_loss_coef: weight of the loss that balances experts, 0 without one.
        has_images: whether the dataset has images.
    """
    if aux_loss_coef:
        raise ValueError(
            f"objective {args.objective!r} leaves out the loss that balances experts, which TRL adds with "
            f"router_aux_loss_coef={aux_loss_coef}: set router_aux_loss_coef=0.0."
        )
    if compute_loss_func is not None:
        raise ValueError(f"compute_loss_func is a loss, and objective {args.objective!r} has its own: leave it out.")
    if args.gradient_checkpointing and args.checkpointing_options.get("use_reentrant"):
        raise ValueError(
            f"objective {args.objective!r} loses its gradient without an error under reentrant checkpointing. Set "
            "gradient_checkpointing_kwargs={'use_reentrant': False}."
        )
    if args.objective_options.reads_short_contexts:
        plugin = getattr(accelerator.state, "fsdp_plugin", None)
        if plugin is not None and getattr(plugin, "fsdp_version", 2) == 1:
            raise ValueError(
                "longce and kl_longce read as many short windows as the rank's own documents have, and FSDP1 hides "
                "that weights are gathered for each: set fsdp_config={'fsdp_version': 2}, or use DDP or DeepSpeed."
            )
        if has_images:
            raise ValueError(
                "longce and kl_longce read short windows of a row's tokens without its images: leave them out for a "
                "dataset with images."
            )
    # weights on the CPU or on "meta" are offloaded by accelerate, and come to the GPU that computes
    devices = {str(p.device) for p in model.parameters() if p.device.type not in ("cpu", "meta")}
    if len(devices) > 1:
        raise ValueError(
            f"objective {args.objective!r} computes its loss on one GPU, and device_map has spread the model over "
            f"{', '.join(sorted(devices))}: {_INSTEAD_OF_SPREADING}"
        )


def check_next_token(model: nn.Module, here: torch.device) -> None:
    """Raise ValueError if `device_map` has put the output head on another GPU than `here`, where TRL's loss runs.

    TRL 1.16 starts its kernel on the process's own GPU: on two H200s a head on the other one made the loss -inf.
    """
    head = find_causal_lm(model).get_output_embeddings()
    there = getattr(getattr(head, "weight", None), "device", None)
    if there is None or there.type != "cuda" or (there.index or 0) == (here.index or 0):
        return
    raise ValueError(
        f"device_map has put the output head on {there}, and TRL computes the loss on {here}: {_INSTEAD_OF_SPREADING}"
    )


def check_shared_sequences(model: nn.Module, args: "RopeSFTConfig", ranks: SequenceRanks, has_images: bool) -> None:
    """Raise ValueError if ranks share each sequence and the training needs whole rows on one rank."""
    reason = "images belong to whole rows" if has_images else None
    reason = reason or why_not_shared(model, args, ranks.engine, ranks.size)
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
        engine: that would share sequences.
        size: ranks that would share a sequence.
    """
    view = args.make_view()
    options: Any = args.objective_options
    causal_lm = find_causal_lm(model)
    config = causal_lm.config.get_text_config(decoder=True)
    n_heads = getattr(config, "num_attention_heads", 1)
    n_kv_heads = getattr(config, "num_key_value_heads", None) or n_heads
    attends = bool(getattr(options, "attention", 0.0))  # compares attention maps, for which ranks exchange heads
    attention = attention_name(causal_lm)
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:  # one window for all layers, as Mistral's
        has_local_layers = getattr(config, "sliding_window", None) is not None
    else:
        has_local_layers = any(map(is_local, layer_types))
    common_reasons = {
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
    ring_reasons = {
        "padding_free rows hold several documents, which a ring does not keep apart": args.padding_free,
        "packed rows hold several documents, which a ring does not keep apart": args.packing
        and args.packing_strategy != "wrapped",
        "layers with sliding windows would attend to all tokens before, as a ring has no masks": has_local_layers,
        f"attention is {attention}, where a ring is one of sdpa": attention != "sdpa",
    }
    ulysses_reasons = {
        "attention with dropout makes a teacher's forward look like an evaluation, which Ulysses does not split": bool(
            getattr(config, "attention_dropout", 0.0)
        ),
        f"view {view.name!r} with {view.cuts} cuts rows, which Ulysses has split before": view.cuts is not None,
    }
    reasons = common_reasons | (ring_reasons if engine == "cp" else ulysses_reasons)
    return next((reason for reason, applies in reasons.items() if applies), None)
