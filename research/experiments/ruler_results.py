"""The tables and the figure of research/results/ruler.md, which are written into it.

Run: python research/experiments/ruler_results.py [--add FILE.jsonl ...] [--add-gemma FILE.jsonl ...]

--add names files of keeping.py, also OUT.parts.jsonl of a run that was cut off, of which what the tables need goes to
ruler-later-h200.jsonl first. What it has of a model and seed stands beside what ruler-h200.jsonl has: other lengths, the
chat template, short text, other seeds. --add-gemma does so with files of Gemma-3-270M and ruler-gemma-h200.jsonl.

Scores are means over tasks, each with as many prompts, and over seeds. A figure that is below the model as it came
beyond noise is marked with *: the 95 % interval of the paired difference lies below 0.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from keeping_results import beyond, cell, ended
from paired_results import head, macro, row
from result_lines import add_line, mean_of, read_lines, runs_by_arm, spread
from result_parts import Parts
from rope_patch.eval.measures.ruler_prompts import TASKS
from rope_patch.eval.results.figures import add_legend, compact, mark_window, new_figure, save_figure

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "research" / "results"
FILE, LATER, PAGE = RESULTS / "ruler-h200.jsonl", RESULTS / "ruler-later-h200.jsonl", RESULTS / "ruler.md"
GEMMA = RESULTS / "ruler-gemma-h200.jsonl"
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
GEMMA_NAMES = {"native": "as it came", "yarn": "YaRN 4x, untrained", "skills": "extended by rope-patch"}
DRAWN = ("native", "yarn", "skills")
BY_TASK = {arm: NAMES[arm] for arm in ("native", "yarn", "skills", "keep-2", "skills-no-kl-slow")}
RULER = ("ruler", "ruler_chat")
KEPT = (
    "arm", "seed", "window", "target", "rescale", "rows_seconds", "train_seconds", "steps", "learning_rate",
    "loss_by_position", "own", *RULER, "short_text", "gpu", "versions", "commit",
)  # fmt: skip
Run = dict[str, Any]
Runs = dict[str, list[Run]]


def load(later: Path = LATER) -> Runs:
    """Runs of each arm, one a seed, each with what was measured of it later."""
    runs = runs_by_arm(read_lines(FILE))
    for line in read_lines(later):
        same = runs.setdefault(line["arm"], [])
        run = next((run for run in same if run["seed"] == line["seed"]), None)
        if run is None:
            same.append(line)
            continue
        for form in RULER:
            if form in run and form in line:
                _add_lengths(run[form], line[form])
        run |= {name: value for name, value in line.items() if name not in run}
    return runs


def _add_lengths(measured: dict[str, Any], later: dict[str, Any]) -> None:
    """Add the lengths that `measured` does not have."""
    for k, length in enumerate(later["lengths"]):
        if length not in measured["lengths"]:
            measured["lengths"].append(length)
            for task, scores in measured["scores"].items():
                scores.append(later["scores"][task][k])


def add(file: Path, later: Path = LATER) -> None:
    """Add what the tables need of a file of keeping.py, or of the parts of a run that was cut off, but replies."""
    lines = read_lines(file)
    if lines and "part" in lines[0]:
        runs = dict.fromkeys((line["arm"], line["seed"]) for line in lines if line["part"])
        lines = [_of_parts(file, *run) for run in runs]
    for line in lines:
        kept = {name: line[name] for name in KEPT if name in line}
        for form in RULER:
            if form in kept:
                kept[form] = {name: line[form][name] for name in ("lengths", "scores")}
        if "own" in kept:
            kept["own"] = {name: value for name, value in line["own"].items() if name != "shown"}
        add_line(later, kept)


def _of_parts(file: Path, arm: str, seed: int) -> Run:
    """What a run that was cut off had measured: of RULER the lengths at which all tasks were asked."""
    known = Parts(file, {"arm": arm, "seed": seed}).known
    line = {"arm": arm, "seed": seed, **known.get("training", {})}
    line |= {name: known[part] for name, part in (("loss_by_position", "losses"), ("own", "own")) if part in known}
    for form, chat in (("ruler", {}), ("ruler_chat", {"chat": True})):
        asked = [json.loads(name) for name in known if name.startswith('{"task"')]
        lengths = dict.fromkeys(cell["length"] for cell in asked)
        cells = {n: [known.get(json.dumps({"task": task, "length": n, **chat})) for task in TASKS] for n in lengths}
        if whole := [n for n in lengths if all(cells[n])]:
            scores = {task: [cells[n][k]["scores"] for n in whole] for k, task in enumerate(TASKS)}
            line[form] = {"lengths": whole, "scores": scores}
    return line


def lengths_of(runs: Runs, form: str = "ruler") -> list[int]:
    """Tokens of the prompts that any model was asked."""
    return sorted({n for same in runs.values() for run in same for n in run.get(form, {}).get("lengths", ())})


def scores(run: Run, length: int, task: str | None = None, form: str = "ruler") -> list[float]:
    """Of the prompts of one length, of one task or of all; none if not measured."""
    lengths, by_task = run.get(form, {}).get("lengths", ()), run.get(form, {}).get("scores", {})
    if length not in lengths:
        return []
    k = lengths.index(length)
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
        figures = _by_length(same, native, lengths)
        figures.append(cell([short_scores(run) for run in same], short_scores(native), 3))
        figures += _losses(same, (64, 8192), (32768, 65536))
        figures.append(cell([ended(run) for run in same if "own" in run], ended(native)))
        lines.append(row([name, str(len(same)), *figures]))
    return "\n".join(lines)


def _by_length(same: Sequence[Run], native: Run, lengths: Sequence[int]) -> list[str]:
    return [cell([scores(run, n) for run in same], scores(native, n) or None, 3) for n in lengths]


def _losses(same: Sequence[Run], *spans: tuple[int, int], digits: int = 2) -> list[str]:
    """Losses between positions, and KL."""
    read = [run for run in same if "own" in run]  # after RULER; a run that was cut off may have none
    losses = [spread([mean_of(run["loss_by_position"], *span) for run in read], 3) for span in spans]
    return [*losses, spread([run["own"]["kl"] for run in read], digits)]


def of_gemma(file: Path = GEMMA) -> list[str]:
    """Tables of Gemma-3-270M by length and by task; none before it is measured."""
    runs = runs_by_arm(read_lines(file))
    if not runs:
        return []
    lengths = lengths_of(runs)
    lines = head(["Gemma-3-270M", "seeds", *map(compact, lengths), "loss to 32K", "loss 32K to 128K", "KL"])
    for arm, name in GEMMA_NAMES.items():
        figures = _by_length(runs[arm], runs["native"][0], lengths)
        figures += _losses(runs[arm], (64, 32768), (32768, 131072), digits=3)
        lines.append(row([name, str(len(runs[arm])), *figures]))
    return ["\n".join(lines), by_task(runs, GEMMA_NAMES, "task, of Gemma-3-270M")]


def beside(runs: Runs, arm: str = "skills") -> str:
    """A row for each other model: by how much `arm` scores more, paired over prompts, each the mean over seeds."""
    lengths = lengths_of(runs)
    lines = head([f"{NAMES[arm]}, less", *map(compact, lengths)])
    for other, name in NAMES.items():
        if other != arm:
            lines.append(row([name, *(beyond(runs[arm], runs[other], partial(scores, length=n)) for n in lengths)]))
    return "\n".join(lines)


def in_chat(runs: Runs) -> str:
    """A row a model: the mean over tasks in raw text and in the chat template, of prompts of the same length."""
    lengths, native = lengths_of(runs, "ruler_chat"), runs["native"][0]
    cells = [(n, form) for n in lengths for form in RULER]
    names = {"ruler": "raw", "ruler_chat": "chat template"}
    lines = head(["RULER, raw and in the chat template", *(f"{compact(n)}, {names[form]}" for n, form in cells)])
    for arm, name in NAMES.items():
        if any("ruler_chat" in run for run in runs[arm]):
            of = [partial(scores, length=n, form=form) for n, form in cells]
            figures = (cell([measure(run) for run in runs[arm]], measure(native) or None, 3) for measure in of)
            lines.append(row([name, *figures]))
    return "\n".join(lines) if lengths else ""


def by_task(runs: Runs, shown: Mapping[str, str] = BY_TASK, first: str = "task") -> str:
    """A row a task: scores of the models that are `shown` by a name, each by the lengths at which it was asked."""
    native = runs["native"][0]
    lengths = {arm: lengths_of({arm: runs[arm]}) for arm in shown}
    lines = head([first, *(f"{name}, {' / '.join(map(compact, lengths[arm]))}" for arm, name in shown.items())])
    for task in sorted(native["ruler"]["scores"]):
        of = partial(scores, task=task)
        columns = (
            " / ".join(cell([of(run, n) for run in runs[arm]], of(native, n) or None) for n in lengths[arm])
            for arm in shown
        )
        lines.append(row([task.removeprefix("ruler_"), *columns]))
    return "\n".join(lines)


def plot(runs: Runs, path: Path) -> list[Path]:
    """Mean scores by length, a line a model, from the lowest to the highest of its seeds."""
    lengths = lengths_of(runs)
    figure, (axes,) = new_figure(1, 4.0)
    for arm in DRAWN:
        there = {n: [fmean(found) for run in runs[arm] if (found := scores(run, n))] for n in lengths}
        asked = [n for n in lengths if there[n]]
        of_seeds = [there[n] for n in asked]
        (line,) = axes.plot(asked, [mean_score(runs, arm, n) for n in asked], marker="o", label=NAMES[arm])
        axes.fill_between(asked, [*map(min, of_seeds)], [*map(max, of_seeds)], color=line.get_color(), alpha=0.2)
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [compact(n) for n in lengths])
    axes.minorticks_off()
    axes.set(xlabel="tokens of the prompt", ylabel="RULER, mean score", ylim=(-0.02, 0.6))
    axes.grid(alpha=0.25)
    mark_window(axes, WINDOW)
    add_legend(figure, axes, columns=3)
    return save_figure(figure, path)


def written(page: str, tables: Sequence[str]) -> str:
    """The page with these tables in place of those whose first column has the same name."""
    blocks = page.split("\n\n")
    for table in filter(None, tables):
        begin = table.partition(" | ")[0] + " | "
        places = [k for k, block in enumerate(blocks) if block.startswith(begin)]
        if len(places) != 1:
            raise ValueError(f"the page has {len(places)} tables that begin with {begin!r}: write one such line.")
        blocks[places[0]] = table + "\n" * blocks[places[0]].endswith("\n")
    return "\n\n".join(blocks)


def main() -> None:
    """Add results, write the tables into the page, and draw the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--add", type=Path, nargs="+", default=[], metavar="FILE", help="of keeping.py")
    parser.add_argument("--add-gemma", type=Path, nargs="+", default=[], metavar="FILE", help="of Gemma-3-270M")
    args = parser.parse_args()
    for file in args.add:
        add(file)
    for file in args.add_gemma:
        add(file, GEMMA)
    runs = load()
    tables = [by_length(runs), beside(runs), in_chat(runs), by_task(runs), *of_gemma()]
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), tables), encoding="utf-8")
    plot(runs, FIGURE)


if __name__ == "__main__":
    main()
