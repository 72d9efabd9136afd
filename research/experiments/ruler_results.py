"""The tables and the figure of research/results/ruler.md. Run: python research/experiments/ruler_results.py"""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from paired_results import in_brackets
from result_lines import read_lines
from rope_patch.eval.results.figures import add_legend, compact, mark_window, new_figure, save_figure

ROOT = Path(__file__).parents[2]
FILE = ROOT / "research" / "results" / "ruler-h200.jsonl"
FIGURE = ROOT / "docs" / "images" / "ruler-h200"
WINDOW = 8192
NAMES = {"as it came": "as it came", "yarn 8": "YaRN, untrained", "extended": "extended by rope-patch"}
SKILLS = ("extended, skills left out", "extended, skills")
Cells = dict[tuple[str, int, str], list[float]]
"""(model, tokens, task) -> scores of its prompts."""


def cells_of(lines: Sequence[dict[str, Any]]) -> Cells:
    """Scores by model, length and task."""
    return {(line["model"], line["length"], line["task"]): line["scores"] for line in lines if "scores" in line}


def tasks_of(cells: Cells) -> list[str]:
    """The tasks that were measured on all models of the figure at all lengths."""
    lengths = {n for _, n, _ in cells}
    tasks = {task for _, _, task in cells}
    return sorted(task for task in tasks if all((model, n, task) in cells for model in NAMES for n in lengths))


def mean_score(cells: Cells, model: str, length: int) -> float:
    """Mean over tasks, each with as many prompts."""
    return fmean(score for task in tasks_of(cells) for score in cells[model, length, task])


def by_length(cells: Cells) -> str:
    """A row a model, a column a length; of the extended one also its difference to the model as it came."""
    lengths = sorted({n for _, n, _ in cells})
    rows = [["", *map(compact, lengths)], ["---"] * (1 + len(lengths))]
    rows += [[name, *(f"{mean_score(cells, model, n):.3f}" for n in lengths)] for model, name in NAMES.items()]
    difference = ["extended - as it came"]
    for n in lengths:
        pairs = [
            after - before
            for task in tasks_of(cells)
            for after, before in zip(cells["extended", n, task], cells["as it came", n, task], strict=True)
        ]
        difference.append(f"{fmean(pairs):+.3f} {in_brackets(pairs)}")
    return _table([*rows, difference])


def by_task(cells: Cells) -> str:
    """A row a task: scores by length of the model as it came, of YaRN and of the extended model."""
    lengths = sorted({n for _, n, _ in cells})
    heads = ["task", *(f"{NAMES[model]}, {' / '.join(map(compact, lengths))}" for model in NAMES)]
    rows = [heads, ["---"] * len(heads)]
    for task in sorted({task for model, _, task in cells if model in NAMES}):
        columns = [
            " / ".join(f"{fmean(cells[m, n, task]):.2f}" if (m, n, task) in cells else "-" for n in lengths)
            for m in NAMES
        ]
        rows.append([task.removeprefix("ruler_"), *columns])
    return _table(rows)


def of_skills(cells: Cells) -> str:
    """A row a task: scores without and with rows that teach skills, and the difference."""
    rows = [["task", "as it came", "without skills", "with skills", "difference"], ["---"] * 5]
    without, with_skills = SKILLS
    every: list[float] = []
    for task in sorted(task for model, _, task in cells if model == with_skills):
        native, before, after = (cells[model, 4096, task] for model in ("as it came", without, with_skills))
        pairs = [b - a for a, b in zip(before, after, strict=True)]
        every += pairs
        means = (f"{fmean(scores):.2f}" for scores in (native, before, after))
        rows.append([task.removeprefix("ruler_"), *means, f"{fmean(pairs):+.2f} {in_brackets(pairs, digits=2)}"])
    return _table([*rows, ["all four", "", "", "", f"{fmean(every):+.2f} {in_brackets(every, digits=2)}"]])


def plot(cells: Cells, path: Path) -> list[Path]:
    """Mean scores by length, a line a model."""
    lengths = sorted({n for _, n, _ in cells})
    figure, (axes,) = new_figure(1, 4.0)
    for model, name in NAMES.items():
        axes.plot(lengths, [mean_score(cells, model, n) for n in lengths], marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [compact(n) for n in lengths])
    axes.minorticks_off()
    axes.set(xlabel="tokens of the prompt", ylabel="RULER, mean score", ylim=(-0.02, 0.6))
    axes.grid(alpha=0.25)
    mark_window(axes, WINDOW)
    add_legend(figure, axes, columns=3)
    return save_figure(figure, path)


def _table(rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> None:
    """Print the tables and draw the figure."""
    cells = cells_of(read_lines(FILE))
    print(by_length(cells), by_task(cells), of_skills(cells), sep="\n\n")
    plot(cells, FIGURE)


if __name__ == "__main__":
    main()
