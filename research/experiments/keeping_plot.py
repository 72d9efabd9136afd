"""The figure of research/experiments/keeping.py: answers as written by length, a line an arm."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from keeping_results import Run, by_prompts, scores
from paired_results import over_seeds
from rope_patch.eval.results.figures import add_legend, compact, mark_window, new_figure, save_figure
from rope_patch.eval.results.paired import paired_interval

NAMES = {
    "native": "as it came",
    "yarn": "YaRN, untrained",
    "pose": "YaRN and PoSE",
    "no-kl": "the same without teacher",
    "no-kl-2": "the same without teacher",
    "keep-2": "the recipe",
}
TITLES = {"passkey": "passkey", "keys": "numbers among look-alikes", "words": "words among look-alikes"}


def plot(runs: list[Run], path: Path, model: str | None = None) -> list[Path]:
    """The share of right answers of each test, means over seeds with their 95 % intervals over prompts.

    Args:
        runs: of which those are drawn that answered the native model's prompts.
        path: of the figure, which gets the endings .png and .svg.
        model: its name, for the title, or None.
    """
    runs = next(same for same in by_prompts(runs) if any(run["arm"] == "native" for run in same))
    native = next(run for run in runs if run["arm"] == "native")
    lengths = sorted({cell["length"] for cell in native["asked"]})
    tests = [test for test in TITLES if scores(native, test, lengths[0])]
    figure, panels = new_figure(len(tests), 4.0)
    for axes, test in zip(panels, tests, strict=True):
        for arm in dict.fromkeys(run["arm"] for run in runs):
            seeds = [run for run in runs if run["arm"] == arm]
            cells = {n: over_seeds([scores(run, test, n) for run in seeds]) for n in lengths}
            _draw(axes, {n: cell for n, cell in cells.items() if cell}, NAMES.get(arm, arm))
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [compact(n) for n in lengths], rotation=30)
        axes.minorticks_off()
        axes.set(title=TITLES[test], xlabel="tokens of the prompt", ylim=(-0.03, 1.05))
        axes.grid(alpha=0.25)
        mark_window(axes, native.get("window", 8192))
    panels[0].set_ylabel("found, as the model writes")
    if model:
        figure.suptitle(model)
    add_legend(figure, panels[0], columns=3)
    return save_figure(figure, path)


def _draw(axes: Any, cells: Mapping[int, Sequence[float]], label: str) -> None:
    """A line of the means of each length's scores, and their intervals."""
    lengths = list(cells)
    (line,) = axes.plot(lengths, [fmean(cell) for cell in cells.values()], marker="o", markersize=3, label=label)
    low, high = zip(*(paired_interval(cell, bounds=(0.0, 1.0)) for cell in cells.values()), strict=True)
    axes.fill_between(lengths, low, high, color=line.get_color(), alpha=0.12, linewidth=0)
