"""What every measurement returns: a small typed value that can be stored, drawn, compared and read out."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, get_type_hints

from .json_values import is_of_floats, json_values, with_nan

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Pairs:
    """What two models scored on the same prompts, or lost on the same rows, at one length: a cell of a comparison.

    Args:
        first: [n], of the model that the other one is compared with.
        second: [n], of the other one, in the same order.
        unit: what a pair is, in the plural.
        length: tokens of a prompt, or the end of a span of positions; None for short text.
        task: which of the measure's tasks; "" where it has none.
        name: measure or task, and length or span, in words; "" makes it of the others.
        same: whether both were given the same prompts or rows.
        interval: 95 % interval of the mean of differences, for losses; None for scores, of which more is better.
    """

    first: Sequence[float]
    second: Sequence[float]
    unit: str
    length: int | None = None
    task: str = ""
    name: str = ""
    same: bool = True
    interval: Callable[[Sequence[float]], tuple[float, float]] | None = None


class Result(ABC):
    """One measurement of one model; a dataclass of JSON values in every subclass.

    `figure` and `readings` take several, label -> result, so that models can be put side by side in one picture. Three
    fields mean the same in every subclass that has them: `window`, positions that figures within and beyond are told
    by; `scores`, task -> score of each sample; and `replies`, what the model wrote to some prompts, as {question,
    expected, reply, score} with length, task or wording, which the report shows.
    """

    title: ClassVar[str]
    """Heading of the measurement; "{measure}" in it stands for the name of the measure."""
    column: ClassVar[str]
    """The column of `table` that models are compared by."""

    def over_window(self, window: int | None) -> Self:
        """The same, with figures within and beyond another window: models are compared over one."""
        return self

    def pairs(self, first: Self, window: int | None) -> list[Pairs]:
        """What this result is compared by with `first`, that of another model; none where no single scores are kept.

        Args:
            first: of the model that this one is compared with.
            window: positions by which losses are split; None if it is not known.
        """
        both = [getattr(result, "scores", {}) for result in (first, self)]
        return [Pairs(both[0][task], both[1][task], "samples", task=task) for task in both[0] if task in both[1]]

    def beside(self, first: Self) -> dict[str, float]:
        """Headline figures that hold for this result and `first`, that of another model, together."""
        return {}

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON values; `from_dict` takes it back.

        A number that is NaN or infinite, as the loss of a model that overflows, is None: JSON has neither.
        """
        return json_values(asdict(self))  # type: ignore[call-overload]  # every subclass is a dataclass

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The result that `to_dict` wrote; None where there can only be a number is NaN."""
        hints = get_type_hints(cls)
        return cls(**{k: with_nan(value) if is_of_floats(hints.get(k)) else value for k, value in values.items()})

    @abstractmethod
    def headline(self) -> dict[str, float]:
        """The few figures that a summary names."""

    @abstractmethod
    def table(self) -> list[dict[str, Any]]:
        """Its figures as rows of equal keys, for a CSV file."""

    @classmethod
    @abstractmethod
    def figure(cls, results: Mapping[str, Self]) -> "Figure":
        """One picture of all `results`."""

    @classmethod
    @abstractmethod
    def readings(cls, results: Mapping[str, Self]) -> list[str]:
        """What the picture says, in plain sentences with the figures in them: one a model, then how to read it."""

    def reading(self, *, label: str = "model") -> list[str]:
        """What this result alone says, in plain sentences."""
        return type(self).readings({label: self})

    def plot(self, path: str | Path, *, label: str = "model") -> list[Path]:
        """Draw this result alone as `path`.png and `path`.svg, and return the two paths."""
        from .figures import drawn_label, save_figure

        return save_figure(type(self).figure({drawn_label(label): self}), path)
