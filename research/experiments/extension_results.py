"""Tables and the figure of `extension`: means over seeds, by target and schedule."""

import json
import statistics
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

from exams import NEEDLES
from keeping_questions import KEYS
from paired_results import (
    Scores,
    cell_scores,
    cells_of,
    difference,
    head,
    macro,
    row,
    seed_pairs,
    written,
    written_names,
)
from result_lines import mean_of, spread
from rope_patch.eval import recovery_ratio
from rope_patch.eval.results.figures import add_legend, compact, new_figure, save_figure

CONTROL = "b=0"  # EndPrompt without a cue, and so without a view: the rescaling and the books


def shown(values: list[float], digits: int) -> str:
    """`spread`, or a dash where nothing was measured."""
    return spread(values, digits) if values else "-"


def summary(lines: list[dict[str, Any]]) -> str:
    """Markdown: a table for each target and schedule, means over seeds with half of their span, and one of costs."""
    runs = [r for r in lines if r["kind"] == "quality"]
    native = next((r for r in runs if r["method"] == "native"), None)
    tables = []
    for target, schedule in dict.fromkeys((r["target"], r["schedule"]) for r in runs if r["schedule"]):
        here = [r for r in runs if (r["target"], r["schedule"]) == (target, schedule)]
        same: dict[tuple[str, int, float | None], list[dict[str, Any]]] = defaultdict(list)
        for run in [native, *here] if native else here:
            same[run["method"], run["tokens"], run["learning_rate"]].append(run)
        bins = here[0]["loss_by_position"]
        lengths = list(here[0]["passkey"])
        head = ["method", "M tokens", "rate", "seeds", *(f"loss {b['first']}-{b['end']}" for b in bins)]
        head += [
            *(f"passkey {n}" for n in lengths),
            *(f"{kind} teacher-forced {n}" for kind in NEEDLES for n in lengths),
        ]
        head += ["short text", "recovery %"]
        table = [
            f"{target} by {schedule}, {here[0]['gpu']}",
            "",
            "| " + " | ".join(head) + " |",
            "|---" * len(head) + "|",
        ]
        for (name, tokens, rate), group in same.items():
            cells = [name, f"{tokens / 1e6:.1f}", f"{rate:g}" if rate else "-", str(len(group))]
            cells += [spread([mean_of(r["loss_by_position"], b["first"], b["end"]) for r in group], 3) for b in bins]
            # the native model is measured once, perhaps for a nearer target
            cells += [shown([r["passkey"][n] for r in group if n in r["passkey"]], 2) for n in lengths]
            forced = [r["teacher_forced"] for r in group]
            cells += [shown([d[kind][n] for d in forced if n in d[kind]], 2) for kind in NEEDLES for n in lengths]
            measured = [r for r in group if r["short_mean"] is not None]
            cells.append(shown([r["short_mean"] for r in measured], 3))
            kept = [recovery_ratio(r["short"], native["short"]) for r in measured if native and native["short"]]
            cells.append(shown(kept, 1))
            table.append("| " + " | ".join(cells) + " |")
        tables.append("\n".join(table))
        tables += compared(here)
    costs: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for run in lines:
        if run["kind"] == "cost":
            costs[
                run["target"], run["schedule"], json.dumps(run["override"]), run["method"], run["rows_at_once"]
            ].append(run)
    if costs:
        table = ["| target | schedule | settings | method | rows at once | runs | tokens/s | over full length | GiB |"]
        table.append("|---" * 9 + "|")
        for (target, schedule, override, name, rows), group in costs.items():
            rate = statistics.median(r["tokens_per_second"] for r in group)
            full = costs.get((target, schedule, override, "full length", 1))
            over = f"{rate / statistics.median(r['tokens_per_second'] for r in full):.2f}x" if full else "-"
            peaks = [r["peak_gib"] for r in group if r["peak_gib"]]
            peak = f"{max(peaks):.1f}" if peaks else "-"
            cells = [str(target), schedule, override, name, str(rows), str(len(group)), f"{rate:,.0f}", over, peak]
            table.append("| " + " | ".join(cells) + " |")
        tables.append("\n".join(table))
    return "\n\n".join(tables)


def compared(runs: list[dict[str, Any]]) -> list[str]:
    """What prompts have scores for, of one target and schedule: differences from "b=0", and numbers by distance.

    A method at several rates is compared at each with "b=0" at the same one, or with the only one that there is. In
    brackets stands the paired 95 % interval, over prompts, of the mean over seeds.
    """
    scored = [r for r in runs if r.get("asked") or r.get("short_scores")]
    if not scored:
        return []
    same: dict[tuple[str, float | None], list[dict[str, Any]]] = defaultdict(list)
    for run in scored:
        same[run["method"], run["learning_rate"]].append(run)
    cells = cells_of(scored)
    by: dict[str, Scores] = {f"{test} {n}": partial(cell_scores, test=test, length=n) for test, n in cells}
    by["short text"] = lambda run: macro(run.get("short_scores", {}))
    controls = {rate: group for (name, rate), group in same.items() if name == CONTROL}
    above = head(["method", "rate", "seeds", *by])
    as_written = head(["as written", "rate", "seeds", *written_names(cells)])
    for (name, rate), group in same.items():
        shown_rate = f"{rate:g}" if rate else "-"
        control = next(iter(controls.values())) if len(controls) == 1 else controls.get(rate, [])
        # what does not train has one run, for all seeds of the control
        pairs = seed_pairs(group, control) if rate else [(group[0], run) for run in control]
        if name != CONTROL and pairs:
            above.append(row([name, shown_rate, str(len(pairs)), *(difference(pairs, s) for s in by.values())]))
        as_written.append(row([name, shown_rate, str(len(group)), *written(group, cells, KEYS)]))
    counts = ", ".join(f"{name} {len(scores(scored[0]))}" for name, scores in by.items())
    said = f'Scores above "{CONTROL}", of the same seeds. Prompts a cell and seed: {counts}.'
    return ["\n".join([said, "", *above]), *(["\n".join(as_written)] if cells else [])]


def plot(lines: list[dict[str, Any]], path: Path, window: int) -> list[Path]:
    """Loss from the window to the target of every trained run: a dot a seed, a colour a schedule, a panel a target.

    A dashed line is the loss under a schedule without training, where it is not far away. Methods are in the order of
    their means under the schedule that has most of them and the lowest loss.
    """
    runs = [r for r in lines if r["kind"] == "quality" and r["schedule"]]
    targets = sorted({r["target"] for r in runs})
    schedules = list(dict.fromkeys(r["schedule"] for r in runs))

    def loss(run: dict[str, Any]) -> float:
        # from the first bin that goes beyond the window
        first = next(b["first"] for b in run["loss_by_position"] if b["end"] > window)
        return mean_of(run["loss_by_position"], first, run["target"])

    n_methods = max(len({r["method"] for r in runs if r["target"] == target}) for target in targets)
    figure, panels = new_figure(len(targets), 1.5 + 0.22 * n_methods, share_y=False)
    for axes, target in zip(panels, targets, strict=True):
        trained = [r for r in runs if r["target"] == target and r["tokens"]]
        by_schedule: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for run in trained:
            by_schedule[run["schedule"]][run["method"]].append(loss(run))
        # of the schedules with most methods the one with the lowest loss
        ordered = max(
            by_schedule.values(), key=lambda by_method: (len(by_method), -min(map(statistics.mean, by_method.values())))
        )
        order = sorted(ordered, key=lambda name: -statistics.mean(ordered[name]))
        order = [*sorted({r["method"] for r in trained} - set(order)), *order]
        widest = max(loss(r) for r in trained)
        for number, schedule in enumerate(schedules):
            same = [r for r in trained if r["schedule"] == schedule]
            places = [order.index(r["method"]) for r in same]
            axes.scatter([loss(r) for r in same], places, s=12, color=f"C{number}", label=schedule, alpha=0.7)
            untrained = [r for r in runs if (r["target"], r["schedule"], r["tokens"]) == (target, schedule, 0)]
            for run in untrained:
                if loss(run) < widest + 0.1:
                    axes.axvline(loss(run), color=f"C{number}", linestyle="--", linewidth=1)
        axes.set_yticks(range(len(order)), order)
        axes.grid(alpha=0.25)
        axes.set(title=f"to {compact(target)}", xlabel=f"loss {compact(window)} to {compact(target)}, nats per token")
    add_legend(figure, panels[0])
    return save_figure(figure, path)
