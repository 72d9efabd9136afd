"""The figures of a report of `rope-patch eval`, for the card of one of the models that it measured."""

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from ..base.json_records import read_record

_STORED = "results.json"
_REPORT_FOLDER = "rope-patch-report"
# conditions of the figures; the others name models and texts by their paths
_CONDITIONS = ("held-out rows", "prompt lengths", "prompts", "dtype", "device", "rope-patch", "transformers")


@dataclass(frozen=True)
class EvalFigures:
    """What a report says of several models.

    Args:
        labels: of the models, in the order of the report.
        own: the label of the model of the card, None where the report does not say which it is.
        rows: (figure, value of each label: None where it was not measured, NaN where what was is no number).
        conditions: under which it was measured, name and value.
    """

    labels: tuple[str, ...]
    own: str | None
    rows: tuple[tuple[str, tuple[float | None, ...]], ...]
    conditions: tuple[tuple[str, str], ...]

    @classmethod
    def read(cls, report: str | os.PathLike[str], checkpoint: str | os.PathLike[str] | None) -> Self:
        """The figures in `report`, its folder or its results.json, of which one model may be that of `checkpoint`.

        Raises:
            FileNotFoundError: there is no report.
            ValueError: the file is none of a report.
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
            rows = tuple((row["figure"], tuple(_figure(row["values"], label) for label in labels)) for row in summary)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"report: {file} is not what `rope-patch eval` writes: {error!r}.") from error
        conditions = tuple((name, str(settings[name])) for name in _CONDITIONS if settings.get(name) is not None)
        return cls(labels, _label_of(settings, labels, checkpoint), rows, conditions)

    @classmethod
    def beside(cls, checkpoint: str | os.PathLike[str]) -> Self | None:
        """Those of a report in a checkpoint's folder, or in the folder around it if it measured that checkpoint."""
        folder = Path(checkpoint)
        inside, around = folder / _REPORT_FOLDER, folder.resolve().parent / _REPORT_FOLDER
        if (inside / _STORED).is_file():
            return cls.read(inside, folder)
        if folder.is_dir() and (around / _STORED).is_file():
            figures = cls.read(around, folder)
            return figures if figures.own is not None else None
        return None


def _figure(values: dict[str, Any], label: str) -> float | None:
    if label not in values:
        return None
    return math.nan if values[label] is None else float(values[label])


def _label_of(settings: dict[str, Any], labels: tuple[str, ...], checkpoint: Any) -> str | None:
    """The label whose model is the folder of the checkpoint: settings have "LABEL=FOLDER@METHOD..." of each."""
    if checkpoint is None:
        return None
    wanted = Path(checkpoint).resolve()
    for label in labels:
        named = str(settings.get(f"model {label}", "")).removeprefix(f"{label}=")
        if named and Path(named).resolve() == wanted:
            return label
    return None
