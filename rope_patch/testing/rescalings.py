"""Checks of a rescaling on a small model: what is saved, what is undone, and what an adapter brings along."""

import tempfile
from importlib.util import find_spec
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from ..loading import load_adapter
from ..methods import resolve_rescaling
from ..patch import native_rope, patch_model, unpatch_model
from ..rescalings import Rescaling
from .models import WINDOW, random_ids, require_alike, small_model


def check_rescaling(rescaling: Rescaling, *, model: Any = small_model) -> None:
    """Check what every rescaling promises: the tests that the rescalings of this package pass, on a small model.

    - Transformers alone loads the saved model, with the same bits; the config alone makes it, too.
    - `native_rope` and `unpatch_model` bring back the model as it was, to the last bit, and leave no trace.
    - A second patch starts from the native RoPE parameters, not from the first one's.
    - Decoding with a KV cache gives the logits of a whole row, within the trained window.
    - An adapter, with PEFT installed, brings its rescaling along.

    Args:
        rescaling: registered.
        model: makes the model, the same one each time; by default a small Llama with a trained window of 64 positions
            and 4 frequencies.

    Raises:
        AssertionError: a promise that the rescaling does not keep.
        ValueError: what the rescaling itself refuses.
    """
    if resolve_rescaling(rescaling.name, rescaling.options()) != rescaling:
        raise AssertionError(f"the options of {rescaling} make another rescaling.")
    with torch.no_grad():
        check_saving(rescaling, model)
        check_undo(rescaling, model)
        check_patching_again(rescaling, model)
        check_decoding(rescaling, model)
    if find_spec("peft") is not None:
        check_adapter(rescaling, model)


def check_saving(rescaling: Rescaling, model: Any = small_model) -> None:
    """Transformers' own model, of the config and of the folder, has the same bits."""
    # rows beyond the trained window, where dynamic types and LongRoPE change their frequencies
    patched, ids = patch_model(model(), rescaling), random_ids(2, WINDOW + 20)
    logits = patched(ids).logits
    built = type(patched)(patched.config)
    built.load_state_dict(patched.state_dict())
    with tempfile.TemporaryDirectory() as folder:
        patched.save_pretrained(folder)
        loaded = AutoModelForCausalLM.from_pretrained(folder)
    for other, where in ((built.eval(), "built of the config"), (loaded, "saved and loaded by Transformers")):
        _require_same_bits(other(ids).logits, logits, f"a model {where} under {rescaling}")


def check_undo(rescaling: Rescaling, model: Any = small_model) -> None:
    """`native_rope` and `unpatch_model` are exact, and leave neither hooks nor other buffers."""
    patched, ids = model(), random_ids(2, 40)
    plain, config = patched(ids).logits, patched.config.to_dict()
    buffers = dict(patched.named_buffers())
    patch_model(patched, rescaling)
    patched(random_ids(1, WINDOW + 20))  # lets dynamic RoPE types move
    after = patched(ids).logits
    with native_rope(patched):
        _require_same_bits(patched(ids).logits, plain, f"native_rope after {rescaling}")
    _require_same_bits(patched(ids).logits, after, f"the forward after native_rope under {rescaling}")
    unpatch_model(patched)
    _require_same_bits(patched(ids).logits, plain, f"unpatch_model after {rescaling}")
    if patched.config.to_dict() != config:
        raise AssertionError(f"unpatch_model after {rescaling} leaves another config.")
    if not all(buffer is buffers[name] for name, buffer in patched.named_buffers()):
        raise AssertionError(f"unpatch_model after {rescaling} leaves other buffers.")
    hooks = [hook for m in patched.modules() for hook in (*m._forward_pre_hooks, *m._forward_hooks)]
    if hooks or any("_rope_patch" in vars(module) for module in patched.modules()):
        raise AssertionError(f"unpatch_model after {rescaling} leaves hooks.")


def check_patching_again(rescaling: Rescaling, model: Any = small_model) -> None:
    """Patching a model that is patched already starts from its native RoPE parameters."""
    once, twice = patch_model(model(), rescaling), patch_model(patch_model(model(), rescaling), rescaling)
    ids = random_ids(1, 40)
    _require_same_bits(twice(ids).logits, once(ids).logits, f"a second patch with {rescaling}")
    if once.config.rope_parameters != twice.config.rope_parameters:
        raise AssertionError(f"a second patch with {rescaling} writes other rope_parameters.")


def check_decoding(rescaling: Rescaling, model: Any = small_model) -> None:
    """Tokens that are decoded with a cache get the logits of a whole row."""
    patched, ids = patch_model(model(), rescaling), random_ids(2, 20)
    whole, cached = patched(ids).logits, patched(ids[:, :12], use_cache=True)
    parts = [cached.logits]
    for t in range(12, 20):
        cached = patched(ids[:, t : t + 1], past_key_values=cached.past_key_values, use_cache=True)
        parts.append(cached.logits)
    require_alike(torch.cat(parts, 1), whole, f"logits of decoding and of a whole row under {rescaling}")


def check_adapter(rescaling: Rescaling, model: Any = small_model) -> None:
    """`load_adapter` puts an adapter on the RoPE that it was trained with."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted, ids = get_peft_model(patch_model(model(), rescaling), config).eval(), random_ids(1, 40)
    with tempfile.TemporaryDirectory() as folder:
        adapted.save_pretrained(folder)
        loaded = load_adapter(model(), folder).eval()
    with torch.no_grad():
        _require_same_bits(loaded(ids).logits, adapted(ids).logits, f"an adapter that load_adapter loads, {rescaling}")


def _require_same_bits(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    if not torch.equal(actual, expected):
        error = (actual - expected).abs().max().item()
        raise AssertionError(f"{what}: logits must have the same bits, and differ by up to {error:.1e}.")
