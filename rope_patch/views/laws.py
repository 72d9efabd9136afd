"""How a number is drawn: laws, and curricula that change a law while training goes on.

An option of a view is a number or one of these: `Skip(skip=LogUniform(1, 65536))`, in a recipe
`{view: skip, skip: {law: log-uniform, high: 65536}}`. A curriculum stands in the same dictionary:
`{law: log-uniform, high: 65536, curriculum: step, until: 0.5}`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch

from ..base.draws import DrawKey
from ..base.registry import Registry, from_options, require_known
from ..base.validators import require_integer, require_number

LAWS, CURRICULA = Registry("law"), Registry("curriculum")

End = Any
"""End of a range: an int64 tensor where integers are drawn, else a number or a float64 tensor."""


class Law:
    """Base of laws and curricula. Most laws draw integers or real numbers, as the view needs."""

    name: ClassVar[str]
    synonyms: ClassVar[tuple[str, ...]] = ()

    def sample(self, key: DrawKey, slot: int, most: torch.Tensor | None = None) -> torch.Tensor:
        """Draw a number for each document of `key`.

        Args:
            key: source of randomness.
            slot: which of the independent draws of the key.
            most: None to draw real numbers, float64. To draw integers: the largest one for each document, int64, which
                stands for a `high` that was left out.
        """
        raise NotImplementedError

    @property
    def numbers(self) -> tuple[float | None, ...]:
        """The arguments that a view checks; None is a `high` that was left out."""
        raise NotImplementedError

    def reach(self, most: Any = None) -> Any:
        """Largest number that can be drawn; `most` as in `sample`, or one integer."""
        return most if None in self.numbers else max(self.numbers)  # type: ignore[type-var]

    def options(self) -> dict[str, Any]:
        """The dictionary that a recipe has for this law."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]
        return {"law": self.name, **{name: value for name, value in values.items() if value is not None}}


@LAWS.register("uniform")
@dataclass(frozen=True)
class Uniform(Law):
    """U[low, high], or U{low .. high} of integers.

    Args:
        low: smallest number.
        high: largest number; None, where integers are drawn, is as far as the document allows.
    """

    low: float = 1
    high: float | None = None

    def __post_init__(self) -> None:
        if self.high is not None and self.low > self.high:
            raise ValueError(f"law {self.name!r}: low must not exceed high, got low={self.low} and high={self.high}.")

    @property
    def numbers(self) -> tuple[float | None, ...]:
        return self.low, self.high

    def sample(self, key: DrawKey, slot: int, most: torch.Tensor | None = None) -> torch.Tensor:
        return self.between(*self.ends(most), key, slot)

    def ends(self, most: torch.Tensor | None) -> tuple[End, End]:
        """`low` and `high`, as tensors where integers are drawn."""
        if most is None:
            return self.low, self.high
        return torch.full_like(most, self.low), most if self.high is None else torch.full_like(most, self.high)

    def between(self, low: End, high: End, key: DrawKey, slot: int) -> torch.Tensor:
        """Draw by this law from another range."""
        if _is_integer(high):
            return key.integers(torch.minimum(low, high), high, slot)  # a short document may end before `low`
        return low + (high - low) * key.uniform(slot)


@LAWS.register("log-uniform")
@dataclass(frozen=True)
class LogUniform(Uniform):
    """exp U[ln low, ln high], or integers with P(y) = ln(1 + 1 / y) / ln((high + 1) / low): doublings are as likely.

    Args:
        low: smallest number, above 0.
        high: largest number; None, where integers are drawn, is as far as the document allows.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.low > 0:
            raise ValueError(f"law 'log-uniform': low must be above 0, got {self.low}.")

    def between(self, low: End, high: End, key: DrawKey, slot: int) -> torch.Tensor:
        u = key.uniform(slot)
        if not _is_integer(high):
            return low * (high / low) ** u
        least = torch.minimum(low, high).clamp(min=1).double()
        # the floor of a real number, kept within `high` against rounding
        return torch.minimum((least * ((high.double() + 1) / least).pow(u)).long(), high)


@LAWS.register("discrete")
@dataclass(frozen=True)
class Discrete(Law):
    """One of `values`, all equally likely.

    Args:
        values: one or more numbers.
    """

    values: Sequence[float]

    def __post_init__(self) -> None:
        values: object = self.values
        if isinstance(values, str) or not isinstance(values, Sequence) or not values:
            raise ValueError(f"law {self.name!r}: values must be a list of one or more numbers, got {values!r}.")
        object.__setattr__(self, "values", tuple(values))

    @property
    def numbers(self) -> tuple[float | None, ...]:
        return tuple(self.values)

    def sample(self, key: DrawKey, slot: int, most: torch.Tensor | None = None) -> torch.Tensor:
        which = self.which(key, slot)
        # by comparisons: a table would have to be copied to the GPU
        drawn = torch.full_like(which, self.values[0], dtype=torch.float64 if most is None else torch.int64)
        for number, value in enumerate(self.values[1:], 1):
            drawn = torch.where(which == number, value, drawn)
        return drawn

    def which(self, key: DrawKey, slot: int) -> torch.Tensor:
        """Index of the value that is drawn."""
        return key.integers(0, len(self.values) - 1, slot)


@LAWS.register("cycling")
@dataclass(frozen=True)
class Cycling(Discrete):
    """`values` in turn, one for each optimizer step with all its documents.

    Args:
        values: one or more numbers.
    """

    def which(self, key: DrawKey, slot: int) -> torch.Tensor:
        return key.turn(len(self.values))


class Curriculum(Law):
    """Base of laws that change with the progress p of training, from 0 to 1.

    A trainer sets p. In a training loop of your own, set the clock of the model's `view_source`.
    """

    law: Law

    @property
    def numbers(self) -> tuple[float | None, ...]:
        return self.law.numbers

    def options(self) -> dict[str, Any]:
        own = super().options()
        return {**own.pop("law").options(), "curriculum": self.name, **own}


@CURRICULA.register("linear")
@dataclass(frozen=True)
class Linear(Curriculum):
    """The range of a law, moved from `start`, at p = 0, to the range that the law has, at p = 1.

    Args:
        law: Uniform or LogUniform.
        start: `high` at p = 0, where `low` stays but is never above it; or [low, high].
    """

    law: Uniform
    start: float | Sequence[float]

    def __post_init__(self) -> None:
        if not isinstance(self.law, Uniform):
            raise ValueError(f"curriculum 'linear' moves a range, of Uniform or LogUniform, got law={self.law!r}.")
        start: Any = self.start
        if isinstance(start, Sequence):
            if len(start) != 2 or start[0] > start[1]:
                raise ValueError(f"curriculum 'linear': start must be a number or [low, high], got {start!r}.")
            object.__setattr__(self, "start", tuple(start))

    @property
    def _start(self) -> tuple[float, ...]:
        return self.start if isinstance(self.start, tuple) else (self.start,)

    @property
    def numbers(self) -> tuple[float | None, ...]:
        return *self.law.numbers, *self._start

    def sample(self, key: DrawKey, slot: int, most: torch.Tensor | None = None) -> torch.Tensor:
        low, high = self.law.ends(most)
        if key.progress is not None:
            *start_low, start_high = self._start  # start_low is empty where start is one number
            low = _moved(start_low[0], low, key.progress) if start_low else low
            high = _moved(start_high, high, key.progress)
        return self.law.between(low, high, key, slot)

    def reach(self, most: Any = None) -> Any:
        return _at_least(self.law.reach(most), self._start[-1])


@CURRICULA.register("step")
@dataclass(frozen=True)
class Step(Curriculum):
    """True positions until p = `until`, which are an integer of 0 and a real number of 1; then a law.

    Args:
        law: any but a curriculum.
        until: a share of training.
    """

    law: Law
    until: float = 0.5

    def __post_init__(self) -> None:
        if not isinstance(self.law, Law) or isinstance(self.law, Curriculum):
            raise ValueError(f"curriculum 'step': law must be one of {', '.join(LAWS)}, got {self.law!r}.")
        require_number("curriculum 'step': until", self.until, below=1)

    def sample(self, key: DrawKey, slot: int, most: torch.Tensor | None = None) -> torch.Tensor:
        drawn = self.law.sample(key, slot, most)
        if key.progress is None:
            return drawn
        return torch.where(key.progress < self.until, 1.0 if most is None else 0, drawn)

    def reach(self, most: Any = None) -> Any:
        return _at_least(self.law.reach(most), 1.0 if most is None else 0)


def sample(value: float | Law, key: DrawKey, slot: int, most: torch.Tensor | None = None) -> torch.Tensor:
    """`Law.sample`, or the number itself."""
    if isinstance(value, Law):
        return value.sample(key, slot, most)
    if most is not None:
        return torch.full_like(most, value)
    return torch.full((), value, dtype=torch.float64, device=key.device)


def reach(value: float | Law, most: Any = None) -> Any:
    """`Law.reach`, or the number itself."""
    return value.reach(most) if isinstance(value, Law) else value


def share_off(value: float | Law, other: float) -> float:
    """Probability that a real number is not `other`; under a curriculum that of its law."""
    law = value.law if isinstance(value, Curriculum) else value
    if isinstance(law, Uniform):
        return 1.0
    values = law.numbers if isinstance(law, Law) else (law,)
    return sum(each != other for each in values) / len(values)


def require_integers(name: str, value: object, *, least: int, most: int) -> None:
    """Raise ValueError unless `value` is an integer in [least, most], or a law of such."""
    if not isinstance(value, int | Law):
        raise ValueError(
            f"{name} must be an integer or a law, such as Uniform(1, 4096), in a recipe {{law: uniform, high: 4096}}, "
            f"got {value!r}."
        )
    for number in value.numbers if isinstance(value, Law) else (value,):
        if number is not None:
            require_integer(name, number, least=least, most=most)


def require_factors(name: str, value: object) -> None:
    """Raise ValueError unless `value` is a number above 0, or a law of such."""
    for number in value.numbers if isinstance(value, Law) else (value,):
        if number is None:
            raise ValueError(f"{name} needs a law with a largest number, `high`, got {value!r}.")
        require_number(name, number)


def with_laws(options: dict[str, Any]) -> dict[str, Any]:
    """The options of a view with laws for the dictionaries that stand for them in a recipe.

    Raises:
        ValueError: unknown law, curriculum or option of one, or a value out of its range.
    """
    return {
        name: _law_of(value) if isinstance(value, dict) and value.keys() & {"law", "curriculum"} else value
        for name, value in options.items()
    }


def _law_of(options: dict[str, Any]) -> Law:
    given = {"law": "uniform", **options}  # for a dictionary that names a curriculum alone
    name, curriculum = given.pop("law"), given.pop("curriculum", None)
    require_known("law", LAWS, name)
    if curriculum is None:
        return from_options(LAWS[name], f"law {name!r}", given)
    require_known("curriculum", CURRICULA, curriculum)
    names = [f.name for f in fields(CURRICULA[curriculum]) if f.name != "law"]
    owner = f"law {name!r} with curriculum {curriculum!r}, which has {', '.join(names)}"
    own = {option: given.pop(option) for option in names if option in given}  # the rest are the law's
    return from_options(CURRICULA[curriculum], owner, {"law": from_options(LAWS[name], owner, given), **own})


def _is_integer(end: End) -> bool:
    return isinstance(end, torch.Tensor) and not end.is_floating_point()


def _moved(start: float, end: End, progress: torch.Tensor) -> End:
    if _is_integer(end):
        return torch.lerp(torch.full_like(end, start).double(), end.double(), progress).long()
    return start + (end - start) * progress


def _at_least(value: Any, least: float) -> Any:
    return value.clamp(min=least) if isinstance(value, torch.Tensor) else max(value, least)
