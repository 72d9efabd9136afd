"""Tables and the figure of research/experiments/restoration.py: what its --table and --plot make of files.

Differences are of the last stage, from the native model and, for arms of the paper's regimes, from next-token training
of the same weights with the same seeds. Behind them stands the paired 95 % interval, by bootstrap over prompts of the
mean over seeds. Questions of short text are weighed so that benchmarks count alike, as in the mean of the paper.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean

from harness import Line
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
from rates import choices
from restoration_arms import control_of
from result_lines import mean_of, spread
from rope_patch.eval import recovery_ratio
from rope_patch.eval.results.figures import add_legend, compact, mark_window, new_figure, save_figure

WINDOW = 8192  # of lines that do not say it
SPANS = [(0, 1), (1, 2), (2, 4)]  # windows
LAMBADA = "lambada_openai"


def label(run: Line) -> str:
    """The arm, and its rate where that is not its own."""
    rate = run.get("rate")
    return run["arm"] if rate is None else f"{run['arm']}, {rate:g}"


def groups(runs: Sequence[Line]) -> dict[tuple[str, str], list[Line]]:
    """Runs of an arm, a rate and a stage, by what they are called."""
    same: dict[tuple[str, str], list[Line]] = {}
    for run in runs:
        same.setdefault((label(run), run["after"] or ""), []).append(run)
    return same


def last_stages(runs: Sequence[Line]) -> dict[str, list[Line]]:
    """Runs of each arm and rate behind the last stage that it has."""
    order = ["", "distil", "extend"]
    last: dict[str, tuple[str, list[Line]]] = {}
    for (name, after), same in groups(runs).items():
        if name not in last or order.index(last[name][0]) < order.index(after):
            last[name] = after, same
    return {name: same for name, (_, same) in last.items()}


def tables(runs: list[Line]) -> str:
    """Every table that the runs have figures for."""
    last = last_stages(runs)
    made = [table(runs), _rates(runs), *_differences(last), _ruler(last), _distances(last), _logit_kl(runs)]
    return "\n\n".join(text for text in made if text)


def table(runs: list[Line]) -> str:
    """Markdown: means over seeds, with the span of what is compared, and recovery of the model before its rescaling."""
    native = next((r for r in runs if r["arm"] == "native"), {})
    ends = {b["end"] for b in runs[0]["loss_by_position"]}
    window = runs[0].get("window", WINDOW)
    spans = [(a * window, b * window) for a, b in SPANS if b * window in ends]
    names = ["arm", "after", "seeds", *(f"loss {a // 1024}-{b // 1024}K" for a, b in spans), "short text", "recovery %"]
    lines = head(names)
    for (name, after), same in groups(runs).items():
        cells = [spread([mean_of(r["loss_by_position"], a, b) for r in same], 3) for a, b in spans]
        asked = [r for r in same if "short" in r]
        if asked and "short" in native:
            cells += [spread([r["short_mean"] for r in asked], 3)]
            cells += [spread([recovery_ratio(r["short"], native["short"]) for r in asked], 1)]
        else:
            cells += ["-", "-"]
        lines.append(row([name, after, str(len(same)), *cells]))
    return "\n".join(lines)


def _rates(runs: list[Line]) -> str:
    """How far arms are from the native model at each rate, in bold where --best takes it."""
    lines = []
    for arm in dict.fromkeys(run["arm"] for run in runs):
        last = list(last_stages([run for run in runs if run["arm"] == arm]).values())[-1][0]["after"]
        by_rate = choices(runs, {"arm": arm, "after": last})
        if len(by_rate) > 1:
            shown = {rate: f"{rate:g}: {kl:.4f}" for rate, kl in by_rate.items()}
            best = min(by_rate, key=by_rate.__getitem__)
            lines.append(row([arm, *(f"**{text}**" if rate == best else text for rate, text in shown.items())]))
    if not lines:
        return ""
    most = max(line.count("|") - 2 for line in lines)
    return "\n".join([*head(["arm", *["rate: KL from native, by which it is chosen"] * most]), *lines])


def measures(runs: Sequence[Line]) -> dict[str, Scores]:
    """What arms are compared by in pairs, as far as runs have it."""
    found: dict[str, Scores] = {}
    if any("short_scores" in run for run in runs):
        found["short text"] = lambda run: macro(run.get("short_scores", {}))
        found["without LAMBADA"] = lambda run: macro(run.get("short_scores", {}), LAMBADA)
    found |= {f"{test} {n}": partial(cell_scores, test=test, length=n) for test, n in cells_of(runs)}
    found |= {f"RULER {n}": partial(ruler_scores, length=n) for n in _ruler_lengths(runs)}
    return found


def ruler_scores(run: Line, length: int, task: str | None = None) -> list[float]:
    """Of all of RULER's prompts of a length, or of one task's."""
    if length not in _ruler_lengths([run]):
        return []
    k = run["ruler"]["lengths"].index(length)
    by_task = run["ruler"]["scores"]
    return [score for name in sorted(by_task) if task in (None, name) for score in by_task[name][k]]


def _ruler_lengths(runs: Sequence[Line]) -> list[int]:
    return sorted({n for run in runs for n in run.get("ruler", {}).get("lengths", [])})


def _differences(last: dict[str, list[Line]]) -> list[str]:
    """From the native model, and from next-token training of the same weights."""
    by = measures([run for same in last.values() for run in same])
    if not by:
        return []
    native = next(iter(last.get("native", [])), None)
    from_native, from_control = [], []
    for name, same in last.items():
        if native is not None and name != "native":
            cells = [difference([(run, native) for run in same], scores) for scores in by.values()]
            from_native.append(row([name, str(len(same)), *cells]))
        control = control_of(same[0]["arm"])
        if control not in (None, same[0]["arm"]):
            pairs = seed_pairs(same, _control(last, control, same[0].get("rate")))
            if pairs:
                cells = [difference(pairs, scores) for scores in by.values()]
                from_control.append(row([name, str(len(pairs)), *cells]))
    asked = {name: max(len(scores(run)) for same in last.values() for run in same) for name, scores in by.items()}
    counts = [f"{name} {count}" for name, count in asked.items()]
    said = {
        "the native model": from_native,
        "next-token training of the same weights, pi4 ... clm": from_control,
    }
    names = ["arm", "seeds", *by]
    made = ["\n".join([f"Scores above {what}:", "", *head(names), *rows]) for what, rows in said.items() if rows]
    return [*made, f"Prompts a cell and seed: {', '.join(counts)}."] if counts else made


def _control(last: dict[str, list[Line]], control: str, rate: float | None) -> list[Line]:
    """Its runs at one rate: the only one that there is, or else the arm's."""
    by_rate = {same[0].get("rate"): same for same in last.values() if same[0]["arm"] == control}
    return next(iter(by_rate.values())) if len(by_rate) == 1 else by_rate.get(rate, [])


def _ruler(last: dict[str, list[Line]]) -> str:
    """Mean scores by length and task, of the last stages."""
    measured = {name: [r for r in same if "ruler" in r] for name, same in last.items()}
    measured = {name: same for name, same in measured.items() if same}
    if not measured:
        return ""
    first = next(iter(measured.values()))[0]
    tasks, lengths = sorted(first["ruler"]["scores"]), first["ruler"]["lengths"]
    shown = [task.removeprefix("ruler_") for task in tasks]
    lines = head([f"RULER at {' / '.join(map(str, lengths))}", "seeds", "mean", *shown])
    for name, same in measured.items():
        cells = []
        for task in (None, *tasks):
            means = [fmean(s for run in same for s in ruler_scores(run, n, task)) for n in lengths]
            cells.append(" / ".join(f"{mean:.2f}" for mean in means))
        lines.append(row([name, str(len(same)), *cells]))
    return "\n".join(lines)


def _distances(last: dict[str, list[Line]]) -> str:
    """Right answers as written, and keyed numbers by how far from the question their sentence is."""
    measured = {name: [r for r in same if r.get("asked")] for name, same in last.items()}
    measured = {name: same for name, same in measured.items() if same}
    cells = cells_of([run for same in measured.values() for run in same])
    if not cells:
        return ""
    lines = head(["as written", "seeds", *written_names(cells)])
    lines += [row([name, str(len(same)), *written(same, cells, KEYS)]) for name, same in measured.items()]
    return "\n".join(lines)


def _logit_kl(runs: list[Line]) -> str:
    """Relations and the KL of predictions as stage 1 goes on, means over seeds."""
    lines: list[str] = []
    steps: list[int] = []
    for name, of_runs in _first_stages(runs).items():
        logs = [[entry for entry in log if "relation/logit_kl" in entry] for log in of_runs]
        if not all(logs):
            continue
        steps = steps or [logs[0][round(k * (len(logs[0]) - 1) / 4)]["step"] for k in range(5)]
        parts = [part for part in logs[0][0] if part.startswith("relation/")]
        for part in parts:
            by_step = [[entry[part] for log in logs for entry in log if entry["step"] == step] for step in steps]
            shown = [f"{fmean(values):.4f}" if values else "-" for values in by_step]
            lines.append(row([name, part.removeprefix("relation/"), *shown]))
    if not lines:
        return ""
    return "\n".join([*head(["stage 1, mean of the steps up to", "KL, nats", *map(str, steps)]), *lines])


def _first_stages(runs: Sequence[Line]) -> dict[str, list[list[Line]]]:
    """What stage 1 of each arm and seed logged, of lines behind it or behind both stages."""
    logs: dict[str, dict[int, list[Line]]] = {}
    for run in runs:
        log = run.get("log") if run["after"] == "distil" else run.get("before", {}).get("distil", {}).get("log")
        if log:
            logs.setdefault(label(run), {})[run["seed"]] = log
    return {name: list(by_seed.values()) for name, by_seed in logs.items()}


# arm -> how the figure calls it
PLOTTED = {
    "native": "native",
    "pi4": "PI 4x",
    "pi4 ard+cpt": "LinearARD",
    "pi4 ard attn+v +logit+cpt": "attention, v, predictions",
    "pi4 hidden+cpt": "hidden states",
    "pi4 clm 0.0005+cpt": "next-token, all weights",
    "pi4 clm qkv 0.001+cpt": "next-token, q k v",
    "pi4 native kl 1+cpt": "native KL",
}


def plot(runs: list[Line], path: Path) -> list[Path]:
    """Left: loss by position after the last stage. Right: recovery of short text and loss of each seed and stage."""
    native = next(r for r in runs if r["arm"] == "native")
    bins = [(b["first"], b["end"]) for b in native["loss_by_position"]]
    figure, (curves, points) = new_figure(2, share_y=False)
    for number, (arm, label) in enumerate(PLOTTED.items()):
        same = [r for r in runs if r["arm"] == arm]
        last = [r for r in same if r["after"] != "distil"]
        color = f"C{number}"
        losses = [mean_of([b for r in last for b in r["loss_by_position"]], a, b) for a, b in bins]
        curves.plot([(a + b) / 2 for a, b in bins], losses, marker=".", color=color)
        for of_stage in (last, [r for r in same if r["after"] == "distil"]):
            points.scatter(
                [r["loss_in_window"] for r in of_stage],
                [recovery_ratio(r["short"], native["short"]) for r in of_stage],
                label=label if of_stage is last else None,
                edgecolors=color,
                facecolors=color if of_stage is last else "none",
            )
    curves.set_ylim(top=6)
    mark_window(curves, WINDOW)
    ticks = [0, 8192, 16384, 24576, 32768]
    curves.set_xticks(ticks, [compact(t) for t in ticks])
    curves.set(xlabel="position of the predicted token", ylabel="loss, nats per token")
    points.set(xlabel=f"loss within {compact(WINDOW)}, nats", ylabel="short text, % of the native model's")
    points.set(xlim=(None, 3.6), ylim=(91, 101))  # the rescaled model itself is far away
    points.set_title("rings: after stage 1", fontsize="small")
    for axes in (curves, points):
        axes.grid(alpha=0.25)
    add_legend(figure, points, 3)
    return save_figure(figure, path)
