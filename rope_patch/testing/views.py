"""Checks of a view: of what it draws, and of a small model that runs under it."""

import json
from typing import Any

import torch
from transformers import DynamicCache

from ..forward.drawn_view import Batch, DrawnView
from ..forward.sources import ViewSource
from ..methods import resolve_view
from ..patch import patch_model, rope_view, view_source
from ..views import NoPE, View
from .models import N_LAYERS, PAD, WHOLE, laid_out, random_ids, require_alike, small_model

_DOCUMENTS = [[4, 5, PAD, 6, PAD, 4, 7, 5, 6, PAD, 8, 9], [6, 5, PAD, 4, 4, 8, 5, 9], [5] * 6 + [PAD] + [7] * 8]
_PREFILL = 12  # tokens of a prompt


def check_view(view: View) -> None:
    """Check what every view promises: the tests that the views of this package pass, on a small model.

    - Draws go by seed, step and document alone: not by the batch, its layout, padding or packing.
    - `affected_from` and `can_change` agree with what `rope_index` gives.
    - `options` make an equal view, also after JSON, under the name that is registered.
    - A model gives the same logits for a document in all layouts, and for tokens that are decoded with a KV cache one
      by one or at once. Gradient checkpointing leaves gradients as they are, and torch's generator stays untouched.

    Args:
        view: registered, with options under which documents of 6 to 15 tokens are read.

    Raises:
        AssertionError: a promise that the view does not keep.
        ValueError: what the view itself refuses.
    """
    check_options(view)
    for progress in (0.0, 0.5, 1.0):
        for layout in WHOLE:
            check_draws(view, _DOCUMENTS, layout, progress=progress, before=2)
            check_first_changed(view, _DOCUMENTS, layout, progress=progress)
    for length in sorted({len(document) for document in _DOCUMENTS}):
        check_can_change(view, length)
    check_layouts(view)
    check_decoding(view)
    for reentrant in (False, True):
        check_checkpointing(view, reentrant)


def check_options(view: View) -> None:
    """`options`, through JSON, make an equal view."""
    made = resolve_view(view.name, json.loads(json.dumps(view.options())))
    if made != view:
        raise AssertionError(f"the options of {view!r} make another view, {made!r}.")


def check_draws(
    view: View, documents: list[list[int]], layout: str, *, step: int = 5, progress: float = 1.0, before: int = 0
) -> None:
    """A document is drawn for as if it were alone in its step, behind `before` others."""
    index, first, factor = moved(view, documents, layout, step, progress, before)
    for i, ids in enumerate(documents):
        if not fits(view, [ids]):
            continue  # a fixed split or shift beyond its end, which is refused where no document is longer
        alone, own_first, own_factor = moved(view, [ids], "packed", step, progress, before + i)
        # but for the rounding of where a row begins
        same = all(
            abs(x - y) <= 1e-9 for a, b in zip(index[i], alone[0], strict=True) for x, y in zip(a, b, strict=True)
        )
        if not same or first[i] != own_first[0] or factor != own_factor:
            raise AssertionError(
                f"{view!r} draws for document {i} of {len(documents)}, {layout}, r = {index[i]}, and alone {alone[0]}: "
                "draws must come from `key` and the document alone, and rope_index must be elementwise."
            )


def check_first_changed(
    view: View, documents: list[list[int]], layout: str, *, step: int = 5, progress: float = 1.0
) -> None:
    """`affected_from` is min{t : r(t) - r(0) != t} over the layers, or the length."""
    index, first, factor = moved(view, documents, layout, step, progress)
    expected = [_by_definition(of_layer, factor) for of_layer in index]
    if first != expected:
        raise AssertionError(
            f"affected_from of {view!r} gives {first} for documents that are changed from tokens {expected} on."
        )


def check_can_change(view: View, length: int) -> bool:
    """No document of `length` tokens is changed where `can_change` says so; returns whether draws changed some."""
    can = view.can_change(torch.tensor([length]))
    if can.dtype != torch.bool or can.shape != (1,):
        raise AssertionError(f"can_change of {view!r} must be bool in the shape of length, got {can}.")
    # all tokens end sentences and cues
    some = any(s < length for step in range(5) for s in moved(view, [[PAD] * length] * 25, "packed", step)[1])
    if some and not can.item():
        raise AssertionError(f"can_change of {view!r} is false for {length} tokens, and a draw changes them.")
    return some


def check_layouts(view: View) -> None:
    """A model gives the same logits for a document in all layouts.

    Without "packed, padded", where Transformers itself lets documents see each other.
    """
    expected: list[torch.Tensor] = []
    for layout in WHOLE[:-1]:
        inputs, places = laid_out(_DOCUMENTS, layout)
        with torch.no_grad():
            logits = _under(view)(**inputs, use_cache=False).logits
        found = [logits[row, begin : begin + len(ids)] for (row, begin), ids in zip(places, _DOCUMENTS, strict=True)]
        expected = expected or found
        for i, (actual, right) in enumerate(zip(found, expected, strict=True)):
            require_alike(actual, right, f"logits of document {i} under {view!r}, {layout} and {WHOLE[0]}")


@torch.no_grad()
def check_decoding(view: View) -> None:
    """Tokens that follow a cached prompt get the same logits one by one and at once."""
    ids, before = random_ids(2, _PREFILL + 5), torch.get_rng_state()
    found = []
    for steps in ([5], [1] * 5):
        model, parts, end = _under(view), [], 0
        cache = DynamicCache(config=model.config)
        for n in (_PREFILL, *steps):
            parts.append(model(ids[:, end : end + n], past_key_values=cache, use_cache=True).logits)
            end += n
        found.append(torch.cat(parts, 1))
    require_alike(found[1], found[0], f"logits of decoding one by one and at once under {view!r}")
    if not torch.equal(torch.get_rng_state(), before):
        raise AssertionError(f"{view!r} draws from torch's generator: draw from `key` alone.")


def check_checkpointing(view: View, reentrant: bool) -> None:
    """Gradients under checkpointing are those without, also if another view is in force in backward."""
    ids, gradients = random_ids(2, 20), []
    for checkpointing in (False, True):
        model = _under(view).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        loss = model(ids, labels=ids, use_cache=False).loss
        with rope_view(model, NoPE()):
            loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, expected in gradients[0].items():
        require_alike(gradients[1][name], expected, f"gradient of {name} under checkpointing and {view!r}")


def _under(view: View) -> Any:
    """A small model under the view, at the end of a curriculum."""
    model = patch_model(small_model(), view, when="always", seed=3)
    source = view_source(model)
    assert source is not None
    source.clock.set(0, 0, 1.0)
    return model


def drawn(view: View, batch: dict[str, Any], first: int = 0, step: int = 0, progress: float = 1.0) -> DrawnView:
    """What a forward of a batch draws, whose first document is number `first` of its step."""
    source = ViewSource(view, seed=11)
    source.clock.set(step, first, progress)
    ids = batch["input_ids"]
    positions, mask = batch["position_ids"], batch["attention_mask"]
    return source.bind(Batch(len(ids), ids.shape[1], ids.device, positions, mask, 0, True, ids))


def moved(
    view: View, documents: list[list[int]], layout: str, step: int = 0, progress: float = 1.0, first: int = 0
) -> tuple[list[list[list[float]]], list[int], float | None]:
    """r(t) - r(0) of each document in each layer; s as the view says it; and its factor of the RoPE base."""
    batch, places = laid_out(documents, layout)
    draws, shape = drawn(view, batch, first, step, progress), batch["input_ids"].shape
    positions = batch["position_ids"]
    if positions is None:
        positions = torch.arange(shape[1])[None]
    layers = [own(positions).expand(shape) for _, own in draws.by_layer(N_LAYERS)]
    rows = [
        [r[row, begin : begin + len(ids)] for r in layers] for (row, begin), ids in zip(places, documents, strict=True)
    ]
    index = [[(r - r[0]).tolist() for r in own] for own in rows]
    begins = draws.affected_from(_where_tokens_are(batch), N_LAYERS).expand(shape)
    factor = draws.parameters.get("base_factor")
    return index, [int(begins[place]) for place in places], None if factor is None else factor.item()


def _where_tokens_are(batch: dict[str, Any]) -> torch.Tensor:
    """Index of each token in its document, -1 on padding."""
    mask, positions = batch["attention_mask"], batch["position_ids"]
    t = mask.cumsum(1) - 1 if positions is None else positions.expand(batch["input_ids"].shape)
    return t if mask is None else t.masked_fill(mask == 0, -1)


def _by_definition(index: list[list[float]], factor: float | None) -> int:
    n = len(index[0])
    if factor not in (None, 1.0):  # of angles, not of indices
        return min(1, n)
    return min(next((t for t in range(n) if r[t] != t), n) for r in index)


def fits(view: View, documents: list[list[int]]) -> bool:
    """Whether the longest document may be viewed so; as a forward does, refuses what it may not."""
    try:
        view.check_length(max(map(len, documents)))
        if view.layerwise:
            view.check_layers(N_LAYERS)
    except ValueError:
        return False
    return True
