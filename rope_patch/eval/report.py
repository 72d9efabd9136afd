"""Figures, tables and one page from the results of a suite."""

import base64
import csv
import json
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from ..base.environment import device_name, installed_versions
from ..prompts.wordings import N_WORDINGS
from .measures.comparisons import baseline_first
from .regressions import Cell, regressions
from .replies import shown_replies
from .results.figures import drawn_label, require_matplotlib, save_figure
from .results.json_values import json_values
from .results.result import Result
from .suite import MEASURES, Results

_CELLS = "tables/regressions.csv"


def write_report(
    results: Results, folder: str | Path, *, title: str, settings: Mapping[str, Any], window: int | None = None
) -> Path:
    """Write everything about `results` to `folder`.

    `report.html` needs no other file: pictures are inside it. It opens with what each model lost and won beside the
    first one, the cells where it lost, and some of the models' own answers. Beside it are `results.json`,
    `tables/regressions.csv`, and for each measure `figures/NAME.png`, `figures/NAME.svg` and `tables/NAME.csv`. Those
    that an earlier report left in the folder are removed; other files stay. A figure that is NaN or infinite is null in
    `results.json`.

    Args:
        results: measure -> label -> result; the label "native", or else the first, is what the others are compared
            with.
        folder: made if it is not there.
        title: of the page.
        settings: how it was measured, shown at the end of the page.
        window: positions within which a cell counts as inside; None means that of the loss by position.

    Returns:
        The page.

    Raises:
        ImportError: Jinja2 or matplotlib is not installed.
        OSError: the folder cannot be written to.
        ValueError: models were asked different prompts.
    """
    require_report(folder)
    from jinja2 import Environment, PackageLoader, StrictUndefined

    folder = Path(folder)
    results = _comparable(results)
    compared = regressions(results, window=window)
    replies = shown_replies(results, compared)
    _remove_earlier(folder, results)
    sections = []
    for name, by_label in results.items():
        if not by_label:
            continue
        kind = type(next(iter(by_label.values())))
        drawn = {drawn_label(label): result for label, result in by_label.items()}
        png, svg = save_figure(kind.figure(drawn), folder / "figures" / name)
        _write_csv(by_label, folder / "tables" / f"{name}.csv")
        sections.append(
            {
                "name": name,
                "title": kind.title.format(measure=name),
                "reading": kind.readings(by_label),
                "picture": base64.b64encode(svg.read_bytes()).decode(),
                "files": [f"figures/{png.name}", f"figures/{svg.name}", f"tables/{name}.csv"],
            }
        )
    labels = [label for label in (compared.baseline, *compared.labels) if label]
    packages = installed_versions("torch", "transformers", "peft", "lm_eval")
    facts = {**settings, **packages, "device": device_name(torch.cuda.is_available())}
    figures = summary(results)
    values = {measure: {k: r.to_dict() for k, r in by_label.items()} for measure, by_label in results.items()}
    _write_rows([_cell_row(cell) for cell in compared.cells], folder / _CELLS)
    stored = {
        "title": title,
        "settings": facts,
        "summary": figures,
        "regressions": compared.to_dict(),
        "results": values,
    }
    text = json.dumps(json_values(stored), indent=1, allow_nan=False)
    (folder / "results.json").write_text(text + "\n", encoding="utf-8")
    environment = Environment(
        loader=PackageLoader("rope_patch.eval", "templates"), autoescape=True, undefined=StrictUndefined
    )
    page = folder / "report.html"
    page.write_text(
        environment.get_template("report.html.j2").render(
            title=title,
            date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            style=(files("rope_patch.eval") / "templates" / "report.css").read_text(encoding="utf-8"),
            labels=labels,
            verdict=compared.verdict(),
            below=[_shown(cell) for cell in compared.below],
            above=[_shown(cell) for cell in compared.above],
            replies=replies,
            n_wordings=N_WORDINGS,
            summary=figures,
            sections=sections,
            facts=facts,
        ),
        encoding="utf-8",
    )
    return page


def _remove_earlier(folder: Path, results: Results) -> None:
    """Remove figures and tables of an earlier report: what is not measured this time would stay and be out of date."""
    for name in {*MEASURES, *results}:
        for file in (f"figures/{name}.png", f"figures/{name}.svg", f"tables/{name}.csv"):
            (folder / file).unlink(missing_ok=True)
    (folder / _CELLS).unlink(missing_ok=True)


def require_report(folder: str | Path) -> None:
    """Raise what `write_report` would raise for want of a package or a folder, before anything is measured.

    Raises:
        ImportError: Jinja2 or matplotlib is not installed.
        OSError: the folder cannot be made or written to.
    """
    try:
        import jinja2  # noqa: F401
    except ImportError as error:
        raise ImportError("the report needs Jinja2: pip install 'rope-patch[eval]'.") from error
    require_matplotlib()
    require_writable(folder)


def require_writable(folder: str | Path) -> None:
    """Make `folder` if it is not there, and raise OSError if no file can be written in it."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OSError(f"no file can be written in {folder}: {error.strerror or error}. Name another folder.") from error


def _comparable(results: Results) -> Results:
    """The same, the model that others are compared with in front, all losses told over its window."""
    comparable: Results = {}
    for name, by_label in results.items():
        ordered = baseline_first(by_label)
        window = next((getattr(result, "window", None) for result in ordered.values()), None)
        comparable[name] = {label: result.over_window(window) for label, result in ordered.items()}
    return comparable


def summary(results: Results) -> list[dict[str, Any]]:
    """One row a headline figure: {figure, values}, values by label, with what compares a model with the first one."""
    rows: dict[str, dict[str, float]] = {}
    for by_label in _comparable(results).values():
        for label, result in by_label.items():
            first = next(iter(by_label.values()))
            for figure, value in {**result.headline(), **({} if result is first else result.beside(first))}.items():
                rows.setdefault(figure, {})[label] = value
    return [{"figure": figure, "values": values} for figure, values in rows.items()]


def _cell_row(cell: Cell) -> dict[str, Any]:
    """A cell as people read it: shares in percent, losses in nats."""
    scale, unit = (100, "%") if cell.higher_is_better else (1, "nats")
    digits = 1 if cell.higher_is_better else 3
    figures = {
        "first": cell.first,
        "model's": cell.mean,
        "difference": cell.difference,
        "95 % from": cell.low,
        "to": cell.high,
    }
    return {
        "model": cell.label,
        "cell": cell.name,
        "outcome": cell.outcome,
        "in": unit,
        **{name: round(scale * value, digits) for name, value in figures.items()},
        "McNemar's p": "" if cell.p is None else f"{cell.p:.2g}",
        "pairs": cell.n,
        "of": cell.unit,
    }


def _shown(cell: Cell) -> dict[str, Any]:
    """A cell as the page shows it: every figure of a column with as many digits."""
    row = _cell_row(cell)
    digits = 1 if cell.higher_is_better else 3
    shown = {name: f"{row[name]:.{digits}f} {row['in']}" for name in ("first", "model's")}
    shown |= {name: f"{row[name]:+.{digits}f}" for name in ("difference", "95 % from", "to")}
    return {**row, **shown, "pairs": f"{cell.n} {cell.unit}"}


def _write_csv(by_label: Mapping[str, Result], file: Path) -> None:
    """One row a figure, with the first model's figure and the difference from it beside it."""
    (first, first_result), *_ = by_label.items()
    column = first_result.column
    counted = {column, "teacher_forced", "count", "prompts", "samples", "left_out"}

    def place(row: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(value for name, value in row.items() if name not in counted)

    of_first = {place(row): row[column] for row in first_result.table()}
    rows = []
    for label, result in by_label.items():
        for row in result.table():
            beside = of_first.get(place(row))
            known = beside is not None and row[column] is not None
            difference = row[column] - beside if known else None
            rows.append({"model": label, **row, f"{column} of {first}": beside, "difference": difference})
    _write_rows(rows, file)


def _write_rows(rows: list[dict[str, Any]], file: Path) -> None:
    if not rows:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", encoding="utf-8", newline="") as out:
        writer = csv.DictWriter(out, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
