"""Draws that stay with a KV cache: keys in it were rotated by them, and a forward that goes on must use the same.

They are an attribute of the cache, not of the model: several caches may be filled in turn, beams change places within
one, and a cache may be given to a model that has no hooks.
"""

import weakref
from typing import Any

import torch

from .cache_arguments import tokens_in
from .drawn_view import DrawnView, IndexTable

_DRAWS = "_rope_patch_draws"
_IN_VIEW = "_rope_patch_in_view"  # whether a forward that continues the cache under its view is running


def draws_of(cache: Any) -> DrawnView | IndexTable | None:
    """The indices of the keys in a cache; None for true positions or no cache."""
    draws: DrawnView | IndexTable | None = getattr(cache, _DRAWS, None)
    return draws


def set_in_view(cache: Any, in_view: bool) -> None:
    """Mark a cache with draws while a forward under its view runs; `update` checks the mark."""
    if draws_of(cache) is not None:
        setattr(cache, _IN_VIEW, in_view)


def forget_draws(cache: Any) -> None:
    """Remove the draws from an emptied cache, before a forward at true positions.

    Raises:
        ValueError: the cache is not empty, so that its keys are at indices of a view.
    """
    draws = draws_of(cache)
    if draws is None:
        return
    if tokens_in(cache):
        _require_true_positions(draws)
    setattr(cache, _DRAWS, None)


def _require_true_positions(draws: DrawnView | IndexTable) -> None:
    """Raise ValueError if keys that were cached under `draws` are at other indices than their positions."""
    if isinstance(draws, IndexTable) or draws.view.perturbs:
        raise ValueError(why_other_indices(draws, "no view is"))


def why_other_indices(filled: DrawnView | IndexTable, now: str) -> str:
    """Why a cache with keys at indices of `filled` is refused: `now` says what is in force instead."""
    indices = "explicit indices (rope_view(index=...))"
    if isinstance(filled, DrawnView):
        indices = f"the RoPE indices of {filled.view!r}"
    return (
        f"the cache holds keys at {indices}, and {now} in force now: attention would mix the two. "
        "Decode under the view that filled the cache, or start from an empty one."
    )


class _CacheMethod:
    """Replaces a method of one cache."""

    def __init__(self, cache: Any, method: str) -> None:
        # weak: a strong reference would be a cycle, and the cache would stay in memory until garbage collection
        self.cache, self.method = weakref.ref(cache), method

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method of the cache's class."""
        cache = self.cache()
        return getattr(type(cache), self.method)(cache, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_CacheMethod":
        return type(self)(memo.get(id(self.cache()), self.cache()), self.method)

    def __getstate__(self) -> dict[str, Any]:
        return {"cache": self.cache(), "method": self.method}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.cache, self.method = weakref.ref(state["cache"]), state["method"]


class _OtherRows(_CacheMethod):
    """A method that reorders or repeats rows, as beam search does: the draws are reordered with them."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """The one argument holds the rows to take, or how often to repeat each."""
        self.original(*args, **kwargs)
        cache: Any = self.cache()
        draws = getattr(cache, _DRAWS)
        if not isinstance(draws, DrawnView):
            return  # no draws any more, or a table of indices, which the block has for all rows
        (rows,) = (*args, *kwargs.values())
        if isinstance(rows, int):
            rows = torch.arange(len(draws.documents.start)).repeat_interleave(rows)
        elif rows.dtype == torch.bool:
            rows = rows.nonzero().flatten()
        else:
            rows = rows % len(draws.documents.start)  # negative ones count from the end
        setattr(cache, _DRAWS, draws.rows(rows))


class _UnderView(_CacheMethod):
    """`update`, which attention calls: refuses keys of a forward without the view, as of a model without hooks."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Update the cache if the forward runs under the view, or the layer's cache is empty."""
        cache: Any = self.cache()
        draws = getattr(cache, _DRAWS)
        layer = kwargs.get("layer_idx", args[2] if len(args) > 2 else None)
        # per layer: a hybrid's first layer may have no keys, and earlier layers have added those of this forward
        if draws is not None and not getattr(cache, _IN_VIEW) and cache.get_seq_length(layer):
            _require_true_positions(draws)
        return self.original(*args, **kwargs)


def keep_draws(cache: Any, drawn: DrawnView | IndexTable) -> None:
    """Keep the draws on the cache that they filled: other forwards may run before it is continued."""
    setattr(cache, _DRAWS, drawn)
    setattr(cache, _IN_VIEW, False)
    cache.update = _UnderView(cache, "update")
    for method in ("reorder_cache", "batch_select_indices", "batch_repeat_interleave"):
        if hasattr(cache, method):
            setattr(cache, method, _OtherRows(cache, method))
