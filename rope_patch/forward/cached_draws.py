"""Draws that stay with a KV cache: keys in it were rotated by them, and a forward that goes on must use the same.

They are an attribute of the cache, not of the model: several caches may be filled in turn, beams change places within
one, and a cache may be given to a model that has no hooks.
"""

import weakref
from typing import Any

import torch

from ..views.base import View
from .cache_arguments import tokens_in
from .drawn_view import DrawnView, IndexTable

_DRAWS = "_rope_patch_draws"
_IN_VIEW = "_rope_patch_in_view"  # whether a forward that continues the cache under its view is on its way


def draws_of(cache: Any) -> DrawnView | IndexTable | None:
    """The indices that filled a cache, None for true positions or no cache."""
    draws: DrawnView | IndexTable | None = getattr(cache, _DRAWS, None)
    return draws


def set_in_view(cache: Any, in_view: bool) -> None:
    """Note on a cache with draws whether a forward under its view is on its way, which `update` asks for."""
    if draws_of(cache) is not None:
        setattr(cache, _IN_VIEW, in_view)


def forget_draws(cache: Any) -> None:
    """Let a cache that was emptied forget the draws that once filled it, for a forward at true positions.

    Raises:
        ValueError: the cache is not empty: the forward would go on with keys at indices of a view.
    """
    draws = draws_of(cache)
    if draws is None:
        return
    if tokens_in(cache):
        _require_true_positions(draws)
    setattr(cache, _DRAWS, None)


def _require_true_positions(draws: DrawnView | IndexTable) -> None:
    """Raise if a cache that `draws` have filled holds keys at other indices than their positions."""
    if isinstance(draws, IndexTable):
        raise ValueError(why_other_indices("explicit indices (rope_view(index=...))", "none are"))
    if isinstance(draws, DrawnView) and draws.view.perturbs:
        raise ValueError(why_other_view(draws.view, "no view is"))


def why_other_view(filled: View, now: str) -> str:
    """Why a cache that was filled under a view is refused: `now` says what is in force instead."""
    return why_other_indices(f"the RoPE indices of {filled!r}", now)


def why_other_indices(filled: str, now: str) -> str:
    """Why a cache with keys at indices `filled` is refused: `now` says what is in force instead."""
    return (
        f"the cache holds keys at {filled}, and {now} in force now: distances to them would be those of neither. "
        "Decode under the view that filled the cache, or start from an empty one."
    )


class _CacheMethod:
    """Stands in for a method of one cache."""

    def __init__(self, cache: Any, method: str) -> None:
        # weak: a cache that held itself through its own method would stay until the garbage collector comes by
        self.cache, self.method = weakref.ref(cache), method

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """What the cache's class does."""
        cache = self.cache()
        return getattr(type(cache), self.method)(cache, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_CacheMethod":
        return type(self)(memo.get(id(self.cache()), self.cache()), self.method)

    def __getstate__(self) -> dict[str, Any]:
        return {"cache": self.cache(), "method": self.method}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.cache, self.method = weakref.ref(state["cache"]), state["method"]


class _OtherRows(_CacheMethod):
    """A method that changes the rows, as when beams change places: their draws go along."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Do it; the one argument holds the chosen rows, or how often to repeat each."""
        self.original(*args, **kwargs)
        cache: Any = self.cache()
        draws = getattr(cache, _DRAWS)
        if not isinstance(draws, DrawnView):
            return  # forgotten, or a table, which the block holds for all rows
        (rows,) = (*args, *kwargs.values())
        if isinstance(rows, int):
            rows = torch.arange(len(draws.documents.start)).repeat_interleave(rows)
        elif rows.dtype == torch.bool:
            rows = rows.nonzero().flatten()
        else:
            rows = rows % len(draws.documents.start)  # negative ones count from the end
        setattr(cache, _DRAWS, draws.rows(rows))


class _UnderView(_CacheMethod):
    """`update`, which attention calls: refuses keys of a forward that no view decides, as of a model without hooks."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Do it, if the forward is one under a view, or the cache is empty."""
        cache: Any = self.cache()
        draws = getattr(cache, _DRAWS)
        layer = kwargs.get("layer_idx", args[2] if len(args) > 2 else None)
        # each layer for itself: the first of a hybrid may never come by, and earlier ones have just added keys
        if draws is not None and not getattr(cache, _IN_VIEW) and cache.get_seq_length(layer):
            _require_true_positions(draws)
        return self.original(*args, **kwargs)


def keep_draws(cache: Any, drawn: DrawnView | IndexTable) -> None:
    """Leave the draws on the cache that they have filled: other forwards may come before it is continued."""
    setattr(cache, _DRAWS, drawn)
    setattr(cache, _IN_VIEW, False)
    cache.update = _UnderView(cache, "update")
    for method in ("reorder_cache", "batch_select_indices", "batch_repeat_interleave"):
        if hasattr(cache, method):
            setattr(cache, method, _OtherRows(cache, method))
