"""Figures of a report of `rope-patch eval`, for the card of a model that it measured."""

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from ..base.json_records import read_record

_STORED = "results.json"
_REPORT_FOLDER = "rope-patch-report"
# settings that a card shows; the others name models and texts by their paths
_CONDITIONS = ("held-out rows", "prompt lengths", "prompts", "dtype", "device", "rope-patch", "transformers")


@dataclass(frozen=True)
class EvalFigures:
    """Figures of the models of a report.

    Args:
        labels: of the models, in the order of the report.
        own: label of the card's model; None if the report does not say which it is.
        rows: (figure, value for each label). A value is None if it was not measured, and NaN if the result was NaN.
        conditions: (name, value) of settings of the measurement.
    """

    labels: tuple[str, ...]
    own: str | None
    rows: tuple[tuple[str, tuple[float | None, ...]], ...]
    conditions: tuple[tuple[str, str], ...]

    @classmethod
    def read(cls, report: str | os.PathLike[str], checkpoint: str | os.PathLike[str] | None) -> Self:
        """Read a report.

        Args:
            report: its folder or its results.json.
            checkpoint: folder of the card's model, which the report may have measured.

        Raises:
            FileNotFoundError: there is no report.
            ValueError: the file is not a report.
        """
        file = Path(report)
        file = file / _STORED if file.is_dir() else file
        if not file.is_file():
            raise FileNotFoundError(
                f"report: there is no {file}. Name the folder that `rope-patch eval --report` wrote, or its {_STORED}."
            )
        try:
            stored = read_record(file, "Measure again, or name another report.")
            settings, summary = stored["settings"], stored["summary"]
            labels = tuple(dict.fromkeys(label for row in summary for label in row["values"]))
            rows = tuple((row["figure"], tuple(_value(row["values"], label) for label in labels)) for row in summary)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"report: {file} is not what `rope-patch eval` writes: {error!r}.") from error
        conditions = tuple((name, str(settings[name])) for name in _CONDITIONS if settings.get(name) is not None)
        own = None
        if checkpoint is not None:
            wanted = Path(checkpoint).resolve()
            # settings have "model LABEL": "LABEL=FOLDER@METHOD...", and "model LABEL#2": "LABEL=FOLDER" of several
            folders = {
                label: str(settings.get(f"model {label}", ""))
                .removeprefix(f"{label}=")
                .removeprefix(f"{label.rpartition('#')[0]}=")
                for label in labels
            }
            own = next((label for label in labels if folders[label] and Path(folders[label]).resolve() == wanted), None)
        return cls(labels, own, rows, conditions)

    @classmethod
    def beside(cls, checkpoint: str | os.PathLike[str]) -> Self | None:
        """The figures of a report in the checkpoint's folder, or beside the folder if it measured the checkpoint."""
        folder = Path(checkpoint)
        inside, around = folder / _REPORT_FOLDER, folder.resolve().parent / _REPORT_FOLDER
        if (inside / _STORED).is_file():
            return cls.read(inside, folder)
        if folder.is_dir() and (around / _STORED).is_file():
            figures = cls.read(around, folder)
            return figures if figures.own is not None else None
        return None


def _value(values: dict[str, Any], label: str) -> float | None:
    if label not in values:
        return None
    return math.nan if values[label] is None else float(values[label])
