"""The base class of all results: a small dataclass that can be stored, drawn, compared and put into words."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Self, get_type_hints

from .figures import Figure, drawn_label, save_figure
from .json_values import holds_floats, json_values, with_nan


@dataclass(frozen=True)
class Pairs:
    """Scores, or losses, of two models on the same prompts or rows at one length: one cell of a comparison.

    Args:
        first: [n], of the baseline.
        second: [n], of the compared model, in the same order.
        unit: what is paired, in the plural: "prompts", "rows".
        length: tokens of a prompt, or the end of a span of positions; None for short text.
        task: task within the measure; "" if it has none.
        name: measure or task, and length or span, in words; "" builds it from the other fields.
        same: whether both models read the same prompts or rows.
        interval: for losses in nats, function that gives the 95 % interval of the mean difference; None for scores from
            0 to 1, of which more is better.
        sentence: what opens a report if the models differ, with {} for the share of right answers, or exp(-loss), in
            percent: "passkeys in 4,096 tokens: {} are found"; "" says the name and the score.
        note: what a reader of such a comparison has to know, as a sentence; "" for nothing.
    """

    first: Sequence[float]
    second: Sequence[float]
    unit: str
    length: int | None = None
    task: str = ""
    name: str = ""
    same: bool = True
    interval: Callable[[Sequence[float]], tuple[float, float]] | None = None
    sentence: str = ""
    note: str = ""


class Result(ABC):
    """One measurement of one model. Every subclass is a dataclass of JSON values.

    `figure` and `readings` take several results, label -> result, and show the models side by side. Three fields have
    the same meaning in every subclass that has them: `window`, positions that separate "within" from "beyond";
    `scores`, task -> score of each sample; and `replies`, some replies of the model as {question, expected, reply,
    score} with length, task or wording, which the report shows.
    """

    title: ClassVar[str]
    """Heading of the section; "{measure}" in it stands for the name of the measure."""
    column: ClassVar[str]
    """The column of `table` in which models are compared; those before it say what a row is about."""

    def over_window(self, window: int | None) -> Self:
        """A copy whose figures within and beyond use `window`, so that models are compared over the same window."""
        return self

    def pairs(self, first: Self, window: int | None) -> list[Pairs]:
        """Paired scores of the baseline and this model; none if single scores were not kept.

        Args:
            first: result of the baseline.
            window: positions by which losses are split; None if unknown.
        """
        both = [getattr(result, "scores", {}) for result in (first, self)]
        return [Pairs(both[0][task], both[1][task], "samples", task=task) for task in both[0] if task in both[1]]

    def compared_with(self, first: Self) -> dict[str, float]:
        """Headline figures that compare this result with `first`, that of the baseline."""
        return {}

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON values, with None for NaN and infinity, which JSON lacks; `from_dict` reads it."""
        return json_values(asdict(self))  # type: ignore[call-overload]  # every subclass is a dataclass

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The result that `to_dict` wrote; None in a field of floats becomes NaN."""
        hints = get_type_hints(cls)
        return cls(**{k: with_nan(value) if holds_floats(hints.get(k)) else value for k, value in values.items()})

    @abstractmethod
    def headline(self) -> dict[str, float]:
        """The few figures that a summary shows."""

    def figures(self, window: int | None) -> list[tuple[str, str, float]]:
        """The table that opens a report: what each figure is, its printf format, and its value.

        Args:
            window: positions by which losses are split; None if unknown.
        """
        return [(what, "%.3f", value) for what, value in self.headline().items()]

    @abstractmethod
    def table(self) -> list[dict[str, Any]]:
        """All figures as rows with the same keys, for a CSV file."""

    @classmethod
    @abstractmethod
    def figure(cls, results: Mapping[str, Self]) -> Figure:
        """One picture of all `results`."""

    @classmethod
    @abstractmethod
    def readings(cls, results: Mapping[str, Self]) -> list[str]:
        """The picture in sentences, with its figures: some for each model, then how to read them."""

    def reading(self, *, label: str = "model") -> list[str]:
        """`readings` of this result alone."""
        return type(self).readings({label: self})

    def plot(self, path: str | Path, *, label: str = "model") -> list[Path]:
        """Draw this result alone as `path`.png and `path`.svg, and return the two paths."""
        return save_figure(type(self).figure({drawn_label(label): self}), path)
