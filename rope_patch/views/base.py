"""What a view is: a rule from token index to RoPE index, drawn anew for each document."""

from dataclasses import fields
from typing import ClassVar

import torch

from ..documents import Documents
from ..draws import DrawKey
from ..registry import Registry

VIEWS = Registry("view")

Parameters = dict[str, torch.Tensor]

MAX_INDEX = 2**24
"""Largest RoPE index: Transformers multiplies it in float32, which holds no larger integer exactly."""


class View:
    """Base of all views; subclasses are frozen dataclasses registered in `VIEWS`.

    A view acts on t = 0, 1, ..., the index of a token within its document, and has two parts: `draw` gives the
    parameters of each document, `rope_index` maps t with them. The second is elementwise, so that it is right for a
    whole row, for a packed row, for one token that is decoded with a cache and for a shard of a row.
    """

    name: ClassVar[str]
    perturbs: ClassVar[bool] = True  # False: `rope_index` is t whatever is drawn

    def draw(self, length: torch.Tensor, key: DrawKey) -> Parameters:
        """Parameters of each document.

        Args:
            length: tokens of the document, int64, [batch, 1] or [batch, seq_len] (one value a token in packed rows).
            key: source of randomness, in the same shape.

        Returns:
            Tensors that broadcast with `length`.
        """
        raise NotImplementedError

    def draw_for(self, ids: torch.Tensor | None, t: torch.Tensor, documents: Documents, key: DrawKey) -> Parameters:
        """Parameters of the documents of a batch. A view that looks at tokens overrides this, and others `draw`.

        Args:
            ids: of the tokens, [batch, seq_len]; None where a model is given embeddings.
            t: index of each token in its document, [1 or batch, seq_len], negative on padding before it.
            documents: of the batch.
            key: source of randomness, in the shape of documents.

        Returns:
            As `draw`; what has one value a token, [batch, seq_len], goes on with the last one in decoding.
        """
        return self.draw(documents.length, key)

    def rope_index(self, t: torch.Tensor, parameters: Parameters) -> torch.Tensor:
        """RoPE index minus that of the document's first token, int64 or float64, for t (int64 or float64)."""
        raise NotImplementedError

    def affected_from(self, length: torch.Tensor, parameters: Parameters) -> torch.Tensor:
        """First t whose distance to an earlier token of its document is not the true one, `length` where none is.

        Rows before it predict the same as without the view. Token 0 sees no other; from 1 on every view may differ.
        """
        return torch.ones_like(length)

    def affected_share(self, t: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        """Probability over draws that `affected_from` is at most t, float64.

        Raises:
            ValueError: the view does not know it.
        """
        if type(self).affected_from is not View.affected_from:
            raise ValueError(
                f"{_title(self)} does not know how often a token lies behind its first changed one, by which "
                "reduction 'uniform' divides: use 'sequence' or 'token', or another view, e.g. 'skip'."
            )
        return (t >= 1).double()

    @property
    def layerwise(self) -> bool:
        """Whether layers have positions of their own: `layer_groups` then says which."""
        return False

    @property
    def rescales(self) -> bool:
        """Whether `frequencies` differ from the schedule's."""
        return False

    def frequencies(self, inv_freq: torch.Tensor, parameters: Parameters) -> torch.Tensor:
        """Frequencies of a forward, radians per position, given those of the schedule in force, [head_dim / 2]."""
        return inv_freq

    def layer_groups(self, n_layers: int, parameters: Parameters) -> "list[tuple[list[int], View, Parameters]]":
        """Layers that share positions, each group with its view and that one's parameters; together all layers."""
        return [(list(range(n_layers)), self, parameters)]

    def check_length(self, length: int) -> None:
        """Raise ValueError if rows of `length` tokens cannot be viewed this way."""

    def reach(self, length: int, last: int | None = None) -> int | None:
        """Largest RoPE index that a document of `length` tokens can be given, counted from that of its first token.

        Args:
            length: tokens of the document, at least 1.
            last: index of its last token as the view receives it; None is length - 1. Views before this one in a
                `compose` may have moved it.

        Returns:
            The index, rounded up; None where the view does not know it.
        """
        return None

    def check_layers(self, n_layers: int) -> None:
        """Raise ValueError if a layerwise view does not fit a model of `n_layers` layers."""

    def options(self) -> dict[str, object]:
        """The arguments that make an equal view."""
        return {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]


def require_int(owner: object, name: str, value: int | None, low: int, high: int = MAX_INDEX) -> None:
    """Raise unless `value` is None or an integer in [low, high]."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{_title(owner)}: {name} must be an integer or None, got {value!r}.")
    if not low <= value <= high:
        raise ValueError(
            f"{_title(owner)}: {name} must be in [{low}, {high}], got {value}. "
            f"RoPE indices beyond {MAX_INDEX} are not exact in float32."
            if value > high
            else f"{_title(owner)}: {name} must be at least {low}, got {value}."
        )


def require_choice(owner: object, name: str, value: object, allowed: tuple[object, ...]) -> None:
    """Raise unless `value` is one of `allowed`."""
    if value not in allowed:
        raise ValueError(f"{_title(owner)}: {name} must be one of {allowed}, got {value!r}.")


def require_range(owner: object, low: float, high: float) -> None:
    """Raise unless 0 < low <= high and both are finite numbers."""
    for name, value in (("low", low), ("high", high)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise ValueError(f"{_title(owner)}: {name} must be a finite number above 0, got {value!r}.")
    if low > high:
        raise ValueError(f"{_title(owner)}: low must not exceed high, got low={low} and high={high}.")


def require_indexable(owner: object, largest: float) -> None:
    """Raise if a RoPE index of `largest` would not be exact in float32."""
    if largest > MAX_INDEX:
        raise ValueError(
            f"{_title(owner)}: RoPE indices would reach {largest:.0f}; at most {MAX_INDEX} (2**24) are exact in "
            "float32. Use shorter rows or a smaller range."
        )


def require_reach(owner: object, length: int, target: int) -> None:
    """Raise if a document of `length` tokens has no room within `target` positions, or `target` is not exact."""
    if length > target:
        raise ValueError(
            f"{_title(owner)}: documents of {length} tokens reach beyond target={target}. Use shorter rows or a larger "
            "target."
        )
    require_indexable(owner, target)


def require_ids(owner: object, ids: torch.Tensor | None) -> torch.Tensor:
    """The token ids that a view reads.

    Raises:
        ValueError: there are none.
    """
    if ids is None:
        raise ValueError(f"{_title(owner)} reads tokens: call the model with input_ids, not with embeddings.")
    return ids


def _title(owner: object) -> str:
    return f"view {getattr(owner, 'name', type(owner).__name__)!r}"
