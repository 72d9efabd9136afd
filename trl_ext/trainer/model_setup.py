"""Prepare a model for training: remove an earlier trainer's wrapper, patch RoPE, choose the weights that train."""

import copy
import re
from collections.abc import Iterator
from typing import Any

from torch import nn

from rope_patch import patch_model, unpatch_model
from rope_patch.forward.state import state_of
from rope_patch.layout.document_lengths import longest_document
from rope_patch.methods import resolve_view
from rope_patch.patch import view_source
from rope_patch.rope.rotary import find_causal_lm, find_decoder

from ..config import RopeSFTConfig
from ..memory.size import QKV


def has_rope(model: nn.Module) -> bool:
    """Whether `patch_model` takes the model."""
    try:
        find_decoder(model)
    except ValueError:
        return False
    return True


def is_patched(model: nn.Module) -> bool:
    """Whether `patch_model` has patched the model already."""
    return has_rope(model) and state_of(find_decoder(model)) is not None


def with_base_revision(peft_config: Any, revision: str | None) -> Any:
    """A copy of the config of new adapters that records the revision of their base model on the hub.

    PEFT does not record it by itself, and loading the adapter would then take the newest revision.
    """
    if peft_config is None or revision in (None, "main"):
        return peft_config
    named = copy.copy(peft_config)
    named.revision = revision
    return named


def patch_by_config(model: nn.Module, args: RopeSFTConfig, train_dataset: Any) -> None:
    """Apply the rescaling and the view that `args` names; if that fails, leave the model unchanged.

    Args:
        model: with its adapters.
        args: of the trainer.
        train_dataset: as TRL has prepared it.
    """
    rescaling = args.make_rescaling()
    view = resolve_view(args.view, args.view_options)
    was_patched = is_patched(model)
    try:
        if rescaling is not None:
            decoder = find_decoder(model)
            state = state_of(decoder)
            if state is not None and rescaling in state.start_rescalings:  # PI 4x on top of PI 4x would be 16x
                raise ValueError(
                    f"rescale: the adapter of this model was trained with {rescaling}, which load_adapter has put in "
                    "force, and a second one would go on top of it. Leave rescale out to go on with the adapter's, or "
                    "call patch_model before the trainer for both."
                )
            if rescaling.wants_window:  # of the longest row or view target that it is trained on
                rows = max(args.max_length or 0, longest_document(train_dataset) or 0)
                target = max((target for _, target in view.targets()), default=0)
                rescaling = rescaling.with_window(max(rows, target, decoder.config.max_position_embeddings))
            patch_model(model, rescaling)
        # the default view changes nothing and does not replace a view that the user has put on
        before = view_source(model)
        if view.perturbs or before is None or before.of_trainer:
            patch_model(model, view, seed=args.seed if args.view_seed is None else args.view_seed)
            view_source(model).of_trainer = True  # type: ignore[union-attr]
    except Exception:
        if not was_patched:
            unpatch_model(model)
        raise


def forget_earlier_trainer(model: nn.Module) -> None:
    """Remove accelerate's wrapper from a model that another trainer has trained.

    accelerate wraps no model twice, and TRL replaces the wrapped forward: a second stage would silently run without
    autocast, in float32.
    """
    forward = model.__dict__.pop("_original_forward", None)
    if forward is not None:
        model.forward = forward
    model.__dict__.pop("_is_accelerate_prepared", None)


def keep_quantised_weights(model: nn.Module) -> None:
    """Keep bitsandbytes from repacking 4-bit weights in the first evaluation, on CPUs with AVX512-BF16.

    Repacked weights get no gradient, without an error. The flag that this sets is bitsandbytes' own.
    """
    modules: Iterator[Any] = model.modules()
    for module in modules:
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


_QKV = re.compile(rf"(^|\.)({'|'.join(QKV)})\.")


def train_qkv_only(model: nn.Module) -> None:
    """Freeze every weight but those of the projections to queries, keys and values.

    Raises:
        ValueError: the model has adapters, or no projection with a known name.
    """
    decoder = find_decoder(model)
    if find_causal_lm(model) is not model:  # a PeftModel around it
        raise ValueError(
            "trainable='qkv' is for training without adapters: name target_modules in peft_config instead."
        )
    names = [name for name, _ in decoder.named_parameters() if _QKV.search(name)]
    if not names:
        raise ValueError(
            f"trainable='qkv' knows no projections to queries, keys and values in {type(model).__name__}: set "
            "trainable='all', or train adapters."
        )
    chosen = {id(parameter) for name, parameter in decoder.named_parameters() if name in names}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in chosen)
