"""Tables of what research/experiments/rpsd_far.py found: what its --table prints.

Figures are means over seeds. Behind those of exams stands the 95 % interval of the difference from next-token training:
paired over exams, each of which counts by its mean over questions and seeds, as questions about one text are no
independent prompts.
"""

from statistics import fmean, median
from typing import Any

from paired_results import head, in_brackets, seed_pairs
from paired_results import row as markdown_row
from result_lines import mean_of, runs_by_arm, spread

Run = dict[str, Any]
CONTROL, SKIP = "next-token", "skip"


def by_exam(runs: list[Run], kind: str, length: int) -> list[float]:
    """Of each exam the share of right answers, mean over the runs."""
    cells = [c["marks"] for run in runs for c in run["exams"] if (c["kind"], c["length"]) == (kind, length)]
    return [fmean(fmean(right for _, right in exam) for exam in same) for same in zip(*cells, strict=True)]


def differences(pairs: list[tuple[Run, Run]], cell: tuple[str, int, int]) -> list[float]:
    """Of each exam how much more the first runs of pairs have than the second ones."""
    ours, theirs = (by_exam([pair[k] for pair in pairs], *cell[:2]) for k in (0, 1))
    return [a - b for a, b in zip(ours, theirs, strict=True)]


def by_place(run: Run, kind: str, length: int, parts: int = 5) -> list[float | None]:
    """Shares of right answers by where in the row the sentence is, in equal parts from its start."""
    (cell,) = (c for c in run["exams"] if (c["kind"], c["length"]) == (kind, length))
    answers = [answer for exam in cell["marks"] for answer in exam]
    rights = [[right for depth, right in answers if int(parts * depth) == part] for part in range(parts)]
    return [fmean(part) if part else None for part in rights]


def kl(run: Run) -> float | None:
    """The median KL of the last quarter of training, in nats; None where there is none."""
    logged = [entry["kl"] for entry in run["log"] if "kl" in entry]
    return median(logged[-max(len(logged) // 4, 1) :]) if logged else None


def far_attention(run: Run, least: int) -> float:
    """The share of attention that goes to keys at least so many tokens back."""
    mass, edges = run["attention"]["mass"], run["attention"]["edges"]
    return sum(share for share, begin in zip(mass, edges[:-1], strict=True) if begin >= least)


def short_text(run: Run) -> float | None:
    """Mean over all samples of all benchmarks."""
    scores = [s for of_one in run.get("short_text", {}).get("scores", {}).values() for s in of_one]
    return fmean(scores) if scores else None


def cells_of(run: Run) -> list[tuple[str, int, int]]:
    """(kind, length, YaRN's factor) of each cell, in their order."""
    return sorted((c["kind"], c["length"], c["yarn"]) for c in run["exams"])


def _cell_name(cell: tuple[str, int, int]) -> str:
    kind, length, yarn = cell
    return f"{kind} {length}" + (f", YaRN {yarn}x" if yarn > 1 else "")


def tables(runs: list[Run]) -> str:
    """Markdown: exams by length, at the farthest seed by seed, by the place of the answer, and everything else."""
    by_arm = runs_by_arm(sorted(runs, key=lambda run: run["seed"]))
    cells = cells_of(next(iter(by_arm.values()))[0])
    of_rows = [cell for cell in cells if cell[2] == 1][1::2]  # not of the window
    farthest = [cell for cell in cells if cell[1] == max(length for _, length, _ in cells)]
    above = [above_table(by_arm, SKIP)] if SKIP in by_arm else []
    by_seed, by_places = seed_table(by_arm, farthest), place_table(by_arm, of_rows)
    return "\n\n".join((exam_table(by_arm, CONTROL), *above, by_seed, by_places, _others(by_arm)))


def exam_table(by_arm: dict[str, list[Run]], control: str) -> str:
    """Markdown: shares of right answers of each cell, with intervals of the difference from `control`."""
    cells = cells_of(next(iter(by_arm.values()))[0])
    lines = head(["arm", "seeds", *map(_cell_name, cells)])
    for arm, same in by_arm.items():
        row = [arm, str(len(same))]
        pairs = seed_pairs(same, by_arm.get(control, []))
        for cell in cells:
            shown = f"{fmean(by_exam(same, *cell[:2])):.3f}"
            row.append(f"{shown} {in_brackets(differences(pairs, cell))}" if arm != control and pairs else shown)
        lines.append(markdown_row(row))
    n_exams = len(by_exam(next(iter(by_arm.values())), *cells[0][:2]))
    from_control = f"; in brackets, from {control} of the same seeds" if control in by_arm else ""
    return "\n".join([*lines, "", f"{n_exams} texts a cell and seed{from_control}."])


def above_table(by_arm: dict[str, list[Run]], arm: str) -> str:
    """Markdown: how much more right answers one arm has than each other, with intervals."""
    cells = cells_of(by_arm[arm][0])
    lines = head([f"{arm} above", "seeds", *map(_cell_name, cells)])
    for other, runs in by_arm.items():
        pairs = seed_pairs(by_arm[arm], runs)
        if other != arm and pairs:
            found = [differences(pairs, cell) for cell in cells]
            shown = [f"{fmean(each):+.3f} {in_brackets(each)}" for each in found]
            lines.append(markdown_row([other, str(len(pairs)), *shown]))
    return "\n".join(lines)


def seed_table(by_arm: dict[str, list[Run]], cells: list[tuple[str, int, int]]) -> str:
    """Markdown: shares of right answers of these cells, seed by seed."""
    lines = head(["arm", *(f"{kind} {length}" for kind, length, _ in cells)])
    for arm, same in by_arm.items():
        of_cells = [[f"{fmean(by_exam([run], kind, length)):.2f}" for run in same] for kind, length, _ in cells]
        lines.append(markdown_row([arm, *(" / ".join(shares) for shares in of_cells)]))
    return "\n".join(lines)


def place_table(by_arm: dict[str, list[Run]], cells: list[tuple[str, int, int]]) -> str:
    """Markdown: shares of right answers of these cells by where in the row the sentence is."""
    lines = head(["arm", *(f"{kind} {length} by place of the answer, in fifths" for kind, length, _ in cells)])
    for arm, same in by_arm.items():
        row = [arm]
        for kind, length, _ in cells:
            parts = zip(*(by_place(run, kind, length) for run in same), strict=True)
            known = [[p for p in part if p is not None] for part in parts]
            row.append(" / ".join(f"{fmean(part):.2f}" if part else "-" for part in known))
        lines.append(markdown_row(row))
    return "\n".join(lines)


def _others(by_arm: dict[str, list[Run]]) -> str:
    first = next(iter(by_arm.values()))[0]
    row_end = first["loss x1"][-1]["end"]
    names = [f"loss {b['first']}-{b['end']}" for b in first["loss x1"]]
    factor = max(yarn for _, _, yarn in cells_of(first))
    end = factor * row_end
    far = [f"loss {row_end}-{end}, YaRN {factor}x"] if factor > 1 else []
    lines = head(
        ["arm", *names, *far, "KL of two views", f"attention beyond {row_end // 4}", "short text"]
        + ["seconds of training"]
    )
    for arm, same in by_arm.items():
        row = [arm, *(spread([run["loss x1"][k]["loss"] for run in same], 3) for k in range(len(names)))]
        row += [spread([mean_of(run[f"loss x{factor}"], row_end, end) for run in same], 3)] if far else []
        for value, digits in ((kl, 4), (lambda run: far_attention(run, row_end // 4), 3), (short_text, 3)):
            known = [found for run in same if (found := value(run)) is not None]
            row.append(spread(known, digits) if known else "-")
        row.append(f"{fmean(run['train_seconds'] for run in same):.0f}")
        lines.append(markdown_row(row))
    return "\n".join(lines)


def summary(run: Run) -> str:
    """A run in a line."""
    found = [f"{kind} {length} {fmean(by_exam([run], kind, length)):.2f}" for kind, length, _ in cells_of(run)]
    return "  ".join([*found, f"loss to {run['loss x1'][-1]['end']} {run['loss x1'][-1]['loss']:.3f}"])
