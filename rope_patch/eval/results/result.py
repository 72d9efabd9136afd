"""What every measurement returns: a small typed value that can be stored, drawn, compared and read out."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, get_type_hints

from .json_values import is_of_floats, json_values, with_nan

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Result(ABC):
    """One measurement of one model; a dataclass of JSON values in every subclass.

    `figure` and `readings` take several, label -> result, so that models can be put side by side in one picture.
    """

    title: ClassVar[str]
    """Heading of the measurement."""
    column: ClassVar[str]
    """The column of `table` that models are compared by."""

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
