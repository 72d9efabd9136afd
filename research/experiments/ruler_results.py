"""The tables and the figure of research/results/ruler.md. Run: python research/experiments/ruler_results.py

Scores are means over tasks, each with as many prompts, and over seeds. A figure that is below the model as it came
beyond noise is marked with *: the 95 % interval of the paired difference lies below 0.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from keeping_results import cell, ended, short_text
from paired_results import in_brackets, over_seeds
from result_lines import mean_of, read_lines, runs_by_arm, spread
from rope_patch.eval.results.figures import add_legend, compact, mark_window, new_figure, save_figure

ROOT = Path(__file__).parents[2]
FILE = ROOT / "research" / "results" / "ruler-h200.jsonl"
FIGURE = ROOT / "docs" / "images" / "ruler-h200"
WINDOW = 8192
NAMES = {
    "native": "as it came",
    "ntk-2": "NTK 16x, untrained",
    "yarn": "YaRN 8x, untrained",
    "skills": "extended by rope-patch",
    "keep-2": "the same without rows of skills",
    "skills-no-kl-slow": "the same without a teacher",
    "skills-lora-slow": "the same by LoRA",
    "pose": "PoSE: YaRN 8x, next tokens of books",
}
DRAWN = ("native", "yarn", "skills")
Run = dict[str, Any]
Runs = dict[str, list[Run]]


def load() -> Runs:
    """Runs of each arm, one a seed."""
    return runs_by_arm(read_lines(FILE))


def lengths_of(runs: Runs) -> list[int]:
    """Tokens of the prompts."""
    lengths: list[int] = runs["native"][0]["ruler"]["lengths"]
    return lengths


def scores(run: Run, length: int, task: str | None = None) -> list[float]:
    """Of the prompts of one length, of one task or of all."""
    k, by_task = run["ruler"]["lengths"].index(length), run["ruler"]["scores"]
    return [score for name in sorted(by_task) if task in (None, name) for score in by_task[name][k]]


def mean_score(runs: Runs, arm: str, length: int) -> float:
    """Mean over tasks, prompts and seeds."""
    return fmean(score for run in runs[arm] for score in scores(run, length))


def short_mean(run: Run) -> float:
    """Mean over benchmarks of their accuracies."""
    return fmean(run["short_text"]["accuracy"].values())


def by_length(runs: Runs) -> str:
    """A row a model: RULER by length, and what became of short text, of losses and of its replies."""
    lengths, native = lengths_of(runs), runs["native"][0]
    heads = [
        "model",
        "seeds",
        *map(compact, lengths),
        "short text",
        "loss to 8K",
        "loss 32K to 64K",
        "KL",
        "replies end",
    ]
    rows = [heads, ["---"] * len(heads)]
    for arm, name in NAMES.items():
        same = runs[arm]
        row = [name, str(len(same))]
        row += [cell([scores(run, n) for run in same], scores(native, n), 3) for n in lengths]
        star = (
            "*"
            if "short_text" in same[0] and cell([short_text(r) for r in same], short_text(native))[-1] == "*"
            else ""
        )
        row.append(f"{fmean(map(short_mean, same)):.3f}{star}" if "short_text" in same[0] else "-")
        row += [
            spread([mean_of(run["loss_by_position"], *span) for run in same], 3)
            for span in ((64, 8192), (32768, 65536))
        ]
        row.append(spread([run["own"]["kl"] for run in same], 2))
        row.append(cell([ended(run) for run in same], ended(native)))
        rows.append(row)
    return _table(rows)


def beside(runs: Runs, arm: str = "skills") -> str:
    """A row for each other model: by how much `arm` scores more, paired over prompts, each the mean over seeds."""
    lengths = lengths_of(runs)
    rows = [[f"{NAMES[arm]}, less", *map(compact, lengths)], ["---"] * (1 + len(lengths))]
    for other, name in NAMES.items():
        if other != arm:
            row = [name]
            for n in lengths:
                ours, theirs = (over_seeds([scores(run, n) for run in runs[x]]) for x in (arm, other))
                pairs = [a - b for a, b in zip(ours, theirs, strict=True)]
                row.append(f"{fmean(pairs):+.3f} {in_brackets(pairs)}")
            rows.append(row)
    return _table(rows)


def by_task(runs: Runs) -> str:
    """A row a task: scores by length of some models."""
    lengths, native = lengths_of(runs), runs["native"][0]
    shown = ("native", "yarn", "skills", "keep-2", "skills-no-kl-slow")
    rows = [["task", *(f"{NAMES[arm]}, {' / '.join(map(compact, lengths))}" for arm in shown)]]
    rows.append(["---"] * len(rows[0]))
    for task in sorted(native["ruler"]["scores"]):
        of = partial(scores, task=task)
        columns = [
            " / ".join(
                cell([of(run, n) for run in runs[arm]], of(native, n) if arm != "native" else None) for n in lengths
            )
            for arm in shown
        ]
        rows.append([task.removeprefix("ruler_"), *columns])
    return _table(rows)


def plot(runs: Runs, path: Path) -> list[Path]:
    """Mean scores by length, a line a model, from the lowest to the highest of its seeds."""
    lengths = lengths_of(runs)
    figure, (axes,) = new_figure(1, 4.0)
    for arm in DRAWN:
        (line,) = axes.plot(lengths, [mean_score(runs, arm, n) for n in lengths], marker="o", label=NAMES[arm])
        of_seeds = [[fmean(scores(run, n)) for run in runs[arm]] for n in lengths]
        axes.fill_between(lengths, [*map(min, of_seeds)], [*map(max, of_seeds)], color=line.get_color(), alpha=0.2)
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
    runs = load()
    print(by_length(runs), beside(runs), by_task(runs), sep="\n\n")
    plot(runs, FIGURE)


if __name__ == "__main__":
    main()
