"""The report of a suite: one page, figures and tables."""

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
from .replies import longest_question, shown_replies
from .results.figures import drawn_label, require_matplotlib, save_figure
from .results.json_values import json_values
from .results.result import Result
from .suite import MEASURES, Results
from .verdict import changes, figure_rows, notes, verdict

_CELLS = "tables/regressions.csv"


def write_report(
    results: Results, folder: str | Path, *, title: str, settings: Mapping[str, Any], window: int | None = None
) -> Path:
    """Write a report of `results` to `folder`.

    `report.html` contains its pictures and needs no other file. It opens with what each model won and lost against the
    baseline, in words. A table of figures, one question with the answers and the pictures follow, and methods and
    statistics come last. Beside it are `results.json`, `tables/regressions.csv`, and for each measure
    `figures/NAME.png`, `figures/NAME.svg` and `tables/NAME.csv`. Figures and tables of an earlier report are removed;
    other files stay. NaN and infinity are null in `results.json`.

    Args:
        results: measure -> label -> result; the baseline is "native", or else the first label.
        folder: folder of the report; it is made if it does not exist.
        title: title of the page.
        settings: how the results were measured; the page shows it at its end.
        window: positions up to which a cell lies within the window; None means the window of the loss by position.

    Returns:
        Path of the page.

    Raises:
        ImportError: Jinja2 or matplotlib is not installed.
        OSError: the folder cannot be written to.
        ValueError: models got different prompts.
    """
    require_report(folder)
    from jinja2 import Environment, PackageLoader, StrictUndefined

    folder = Path(folder)
    results = _comparable(results)
    compared = regressions(results, window=window)
    # files of an earlier report: those of measures that are not in this one would stay and be out of date
    for name in {*MEASURES.names(), *results}:
        for file in (f"figures/{name}.png", f"figures/{name}.svg", f"tables/{name}.csv", _CELLS):
            (folder / file).unlink(missing_ok=True)
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
    _write_rows([_cell_row(cell) for cell in compared.cells], folder / _CELLS)
    packages = installed_versions("torch", "transformers", "peft", "lm_eval")
    facts = {**settings, **packages, "device": device_name(torch.cuda.is_available())}
    figures = summary(results)
    stored = {
        "title": title,
        "settings": facts,
        "verdict": verdict(compared),
        "summary": figures,
        "regressions": compared.to_dict(),
        "results": {measure: {k: r.to_dict() for k, r in by_label.items()} for measure, by_label in results.items()},
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
            labels=[label for label in (compared.baseline, *compared.labels) if label],
            runs=list(dict.fromkeys(label for by_label in results.values() for label in by_label)),
            changes=changes(compared),
            notes=notes(compared),
            figures=figure_rows(results, compared.window),
            question=longest_question(results),
            replies=shown_replies(results, compared),
            n_wordings=N_WORDINGS,
            statistics=compared.statistics(),
            comparisons=[_page_row(cell) for cell in compared.cells],
            summary=figures,
            sections=sections,
            facts=facts,
        ),
        encoding="utf-8",
    )
    return page


def require_report(folder: str | Path) -> None:
    """Raise, before anything is measured, if `write_report` lacks a package or a folder that it can write to."""
    try:
        import jinja2  # noqa: F401
    except ImportError as error:
        raise ImportError("the report needs Jinja2: pip install 'rope-patch[eval]'.") from error
    require_matplotlib()
    require_writable(folder)


def require_writable(folder: str | Path) -> None:
    """Make `folder` if it does not exist, and raise OSError if no file can be written in it."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OSError(f"no file can be written in {folder}: {error.strerror or error}. Name another folder.") from error


def _comparable(results: Results) -> Results:
    """`results` with the baseline in front, and all losses over its window."""
    comparable: Results = {}
    for name, by_label in results.items():
        ordered = baseline_first(by_label)
        window = next((getattr(result, "window", None) for result in ordered.values()), None)
        comparable[name] = {label: result.over_window(window) for label, result in ordered.items()}
    return comparable


def summary(results: Results) -> list[dict[str, Any]]:
    """Rows {figure, values} of headline figures, values by label, with the figures that compare with the baseline."""
    rows: dict[str, dict[str, float]] = {}
    for by_label in _comparable(results).values():
        for label, result in by_label.items():
            first = next(iter(by_label.values()))
            for figure, value in {
                **result.headline(),
                **({} if result is first else result.compared_with(first)),
            }.items():
                rows.setdefault(figure, {})[label] = value
    return [{"figure": figure, "values": values} for figure, values in rows.items()]


def _cell_row(cell: Cell) -> dict[str, Any]:
    """A row of `regressions.csv`: scores in percent, losses in nats."""
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
        "models": cell.runs,
    }


def _page_row(cell: Cell) -> dict[str, Any]:
    """A row of the page's table of comparisons, with signs, units and a fixed number of digits."""
    row = _cell_row(cell)
    digits = 1 if cell.higher_is_better else 3
    shown = {name: f"{row[name]:.{digits}f} {row['in']}" for name in ("first", "model's")}
    shown |= {name: f"{row[name]:+.{digits}f}" for name in ("difference", "95 % from", "to")}
    outcome = {"above": "won", "below": "lost", "same": "may be chance"}[cell.outcome]
    models = f", mean of {cell.runs} models" if cell.runs > 1 else ""
    return {**row, **shown, "outcome": outcome, "pairs": f"{cell.n} {cell.unit}{models}"}


def _write_csv(by_label: Mapping[str, Result], file: Path) -> None:
    """Write the tables of all models, with the baseline's figure and the difference from it in each row."""
    (first, first_result), *_ = by_label.items()
    column = first_result.column

    def key(row: Mapping[str, Any]) -> tuple[Any, ...]:
        """What a row is about: length, depth, task and so on."""
        return tuple(row.values())[: list(row).index(column)]

    baseline = {key(row): row[column] for row in first_result.table()}
    rows = []
    for label, result in by_label.items():
        for row in result.table():
            value, reference = row[column], baseline.get(key(row))
            difference = None if value is None or reference is None else value - reference
            rows.append({"model": label, **row, f"{column} of {first}": reference, "difference": difference})
    _write_rows(rows, file)


def _write_rows(rows: list[dict[str, Any]], file: Path) -> None:
    if not rows:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", encoding="utf-8", newline="") as out:
        writer = csv.DictWriter(out, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
