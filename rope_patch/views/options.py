"""Checks of what views are given."""

import torch

from .base import MAX_INDEX, title
from .laws import Law


def require_int(owner: object, name: str, value: int | None, low: int, high: int = MAX_INDEX) -> None:
    """Raise unless `value` is None or an integer in [low, high]."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{title(owner)}: {name} must be an integer or None, got {value!r}.")
    if not low <= value <= high:
        raise ValueError(
            f"{title(owner)}: {name} must be in [{low}, {high}], got {value}. "
            f"RoPE indices beyond {MAX_INDEX} are not exact in float32."
            if value > high
            else f"{title(owner)}: {name} must be at least {low}, got {value}."
        )


def require_number(owner: object, name: str, value: object) -> None:
    """Raise unless `value` is a number in [1 / MAX_INDEX, MAX_INDEX], beyond which factors leave no exact index."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 1 / MAX_INDEX <= value <= MAX_INDEX:  # type: ignore[operator]
        raise ValueError(
            f"{title(owner)}: {name} must be a finite number above 0, from 2**-24 to 2**24, got {value!r}."
        )


def require_share(owner: object, name: str, value: object) -> None:
    """Raise unless `value` is a number in (0, 1)."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
        raise ValueError(f"{title(owner)}: {name} must be in (0, 1), got {value!r}.")


def require_integers(owner: object, name: str, value: object, low: int) -> None:
    """Raise unless `value` is an integer from `low` on, or a law of such."""
    if isinstance(value, bool) or not isinstance(value, int | Law):
        raise ValueError(
            f"{title(owner)}: {name} must be an integer or a law, such as Uniform(1, 4096), in a recipe "
            f"{{law: uniform, high: 4096}}, got {value!r}."
        )
    for number in value.numbers if isinstance(value, Law) else (value,):
        require_int(owner, name, number, low)  # type: ignore[arg-type]


def require_factors(owner: object, name: str, value: object) -> None:
    """Raise unless `value` is a number that `require_number` takes, or a law of such."""
    for number in value.numbers if isinstance(value, Law) else (value,):
        if number is None:
            raise ValueError(f"{title(owner)}: {name} needs a law with a largest number, `high`, got {value!r}.")
        require_number(owner, name, number)


def require_effect(owner: object, effect: bool, why: str) -> None:
    """Raise unless options have an effect; `why` names them and says why they have none and what to do."""
    if not effect:
        raise ValueError(f"{title(owner)}: {why}")


def require_choice(owner: object, name: str, value: object, allowed: tuple[object, ...]) -> None:
    """Raise unless `value` is one of `allowed`."""
    if value not in allowed:
        raise ValueError(f"{title(owner)}: {name} must be one of {allowed}, got {value!r}.")


def require_indexable(owner: object, largest: float) -> None:
    """Raise if a RoPE index of `largest` would not be exact in float32."""
    if largest > MAX_INDEX:
        raise ValueError(
            f"{title(owner)}: RoPE indices would reach {largest:.0f}; at most {MAX_INDEX} (2**24) are exact in "
            "float32. Use shorter rows or a smaller range."
        )


def require_reach(owner: object, length: int, target: int) -> None:
    """Raise if a document of `length` tokens has no room within `target` positions, or `target` is not exact."""
    if length > target:
        raise ValueError(
            f"{title(owner)}: documents of {length} tokens reach beyond target={target}. Use shorter rows or a larger "
            "target."
        )
    require_indexable(owner, target)


def require_ids(owner: object, ids: torch.Tensor | None) -> torch.Tensor:
    """The token ids that a view reads.

    Raises:
        ValueError: there are none.
    """
    if ids is None:
        raise ValueError(f"{title(owner)} reads tokens: call the model with input_ids, not with embeddings.")
    return ids
