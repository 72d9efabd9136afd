"""The tables and the figure of research/results/ruler.md. Run: python research/experiments/ruler_results.py

Scores are means over tasks, each with as many prompts, and over seeds. A figure that is below the model as it came
beyond noise is marked with *: the 95 % interval of the paired difference lies below 0.
"""

from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from keeping_results import beyond, cell, ended
from paired_results import head, macro, row
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


def short_scores(run: Run) -> list[float]:
    """Of all questions of short text, weighed so that their mean is that of the benchmarks'; none if not measured."""
    return macro(run.get("short_text", {}).get("scores", {}))


def by_length(runs: Runs) -> str:
    """A row a model: RULER by length, and what became of short text, of losses and of its replies."""
    lengths, native = lengths_of(runs), runs["native"][0]
    names = ["model", "seeds", *map(compact, lengths)]
    lines = head([*names, "short text", "loss to 8K", "loss 32K to 64K", "KL", "replies end"])
    for arm, name in NAMES.items():
        same = runs[arm]
        figures = [cell([scores(run, n) for run in same], scores(native, n), 3) for n in lengths]
        figures.append(cell([short_scores(run) for run in same], short_scores(native), 3))
        for first, end in ((64, 8192), (32768, 65536)):
            figures.append(spread([mean_of(run["loss_by_position"], first, end) for run in same], 3))
        figures.append(spread([run["own"]["kl"] for run in same], 2))
        figures.append(cell([ended(run) for run in same], ended(native)))
        lines.append(row([name, str(len(same)), *figures]))
    return "\n".join(lines)


def beside(runs: Runs, arm: str = "skills") -> str:
    """A row for each other model: by how much `arm` scores more, paired over prompts, each the mean over seeds."""
    lengths = lengths_of(runs)
    lines = head([f"{NAMES[arm]}, less", *map(compact, lengths)])
    for other, name in NAMES.items():
        if other != arm:
            lines.append(row([name, *(beyond(runs[arm], runs[other], partial(scores, length=n)) for n in lengths)]))
    return "\n".join(lines)


def by_task(runs: Runs) -> str:
    """A row a task: scores by length of some models."""
    lengths, native = lengths_of(runs), runs["native"][0]
    shown = ("native", "yarn", "skills", "keep-2", "skills-no-kl-slow")
    lines = head(["task", *(f"{NAMES[arm]}, {' / '.join(map(compact, lengths))}" for arm in shown)])
    for task in sorted(native["ruler"]["scores"]):
        of = partial(scores, task=task)
        columns = (" / ".join(cell([of(run, n) for run in runs[arm]], of(native, n)) for n in lengths) for arm in shown)
        lines.append(row([task.removeprefix("ruler_"), *columns]))
    return "\n".join(lines)


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


def main() -> None:
    """Print the tables and draw the figure."""
    runs = load()
    print(by_length(runs), beside(runs), by_task(runs), sep="\n\n")
    plot(runs, FIGURE)


if __name__ == "__main__":
    main()
