"""Tables of what research/experiments/keeping.py found: what its --table prints.

One table for each set of prompts, as models are compared on the same prompts and rows alone, those of a cell being raw
and in the chat template. Figures are means over seeds; losses and KL have half of the distance between the smallest and
the largest with them. A figure worse than the native model's beyond noise is marked with *: the 95 % interval of the
paired difference, by bootstrap over prompts of the mean over seeds, lies beyond 0.
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from statistics import fmean
from typing import Any

from paired_results import SHARES, head, in_brackets, over_seeds
from paired_results import row as markdown_row
from result_lines import mean_of, runs_by_arm, spread
from rope_patch.eval.results.paired import paired_interval

Run = dict[str, Any]
TESTS = ("passkey", "keys", "words")


def scores(run: Run, test: str, length: int) -> list[float]:
    """Of all prompts of a test and a length, raw ones first."""
    cells = [c for c in run["asked"] if (c["test"], c["length"]) == (test, length)]
    return [float(s) for c in sorted(cells, key=lambda c: c["chat"]) for s in c["scores"]]


def short_text(run: Run) -> list[float]:
    """Of all samples of all benchmarks."""
    by_name = run.get("short_text", {}).get("scores", {})
    return [score for name in sorted(by_name) for score in by_name[name]]


def squad(run: Run) -> list[float]:
    """Of each paragraph the share of its questions that are answered right; none in early runs."""
    return [float(score) for score in run.get("squad", {}).get("scores", [])]


def reply_losses(run: Run) -> list[float]:
    """Of each reply, -ln p of a token of it by the native model, below 0 as larger is worse."""
    return [-reply["nll"] for reply in run["own"].get("replies", [])]


def ended(run: Run) -> list[float]:
    """Of each reply, whether it ended within the tokens that it may have."""
    return [float(reply["ended"]) for reply in run["own"].get("replies", [])]


def cell(of_seeds: list[list[float]], native: list[float] | None, digits: int = 2) -> str:
    """The mean over seeds of the means of each seed's scores, with * where `native`'s are better beyond noise.

    Seeds that were cut off before they had any are left out.
    """
    of_seeds = [scores for scores in of_seeds if scores]
    if not of_seeds or native == []:
        return "-"
    mean = f"{abs(fmean(map(fmean, of_seeds))):.{digits}f}"
    if native is None:
        return mean
    _, high = paired_interval([a - b for a, b in zip(over_seeds(of_seeds), native, strict=True)])
    return mean + ("*" if high < 0 else "")


def spans(run: Run) -> list[tuple[int, int]]:
    """Positions between which losses are averaged: within the window, to four times it, and to the end."""
    window, end = run.get("window", 8192), run["loss_by_position"][-1]["end"]  # the first files have no window
    edges = [64, *(edge for edge in (window, 4 * window) if edge < end), end]
    return list(pairwise(edges))


def table(runs: list[Run]) -> str:
    """Markdown of runs on the same prompts; without the native model among them nothing is marked."""
    native = next((r for r in runs if r["arm"] == "native"), None)
    first = native or max(runs, key=lambda run: len(run["asked"]))
    lengths = sorted({c["length"] for c in first["asked"]})
    between = spans(first)

    def of_native(measure: Callable[..., list[float]], *of: Any) -> list[float] | None:
        return None if native is None else measure(native, *of)

    columns = [
        "arm",
        "seeds",
        *(f"loss {a}-{b}" for a, b in between),
        "KL on own texts",
        "replies",
        "ended",
        "short text",
    ]
    if asked := squad(first):
        columns.append("SQuAD")
    tests = [t for t in TESTS if scores(first, t, lengths[0])]  # early runs have fewer
    columns += [f"{tests[0]} at {' / '.join(map(str, lengths))}", *tests[1:]]
    lines = head(columns)
    for arm, seeds in runs_by_arm(sorted(runs, key=lambda r: r["arm"] != "native")).items():
        row = [arm, str(len(seeds))]
        row += [spread([mean_of(run["loss_by_position"], a, b) for run in seeds], 3) for a, b in between]
        row.append(spread([run["own"]["kl"] for run in seeds], 3))
        row.append(cell([reply_losses(run) for run in seeds], of_native(reply_losses)))
        row.append(cell([ended(run) for run in seeds], of_native(ended)))
        row.append(cell([short_text(run) for run in seeds], of_native(short_text), 3))
        if asked:
            row.append(cell([squad(run) for run in seeds], of_native(squad), 3))
        for test in tests:
            cells = [cell([scores(run, test, n) for run in seeds], of_native(scores, test, n)) for n in lengths]
            row.append(" / ".join(cells))
        lines.append(markdown_row(row))
    counts = [f"{test} {' / '.join(str(len(scores(first, test, n))) for n in lengths)}" for test in tests]
    conditions = f"Prompts a cell and seed: {', '.join(counts)}; replies {len(reply_losses(first))}; "
    conditions += f"short text {len(short_text(first))} samples"
    if asked:
        conditions += f"; SQuAD {len(asked)} paragraphs"
    return "\n".join([*lines, "", f"{conditions}."])


def beyond(
    seeds: list[Run],
    references: list[Run],
    measure: Callable[[Run], list[float]],
    bounds: tuple[float, float] | None = SHARES,
) -> str:
    """How far seeds of an arm are above those of another, means over seeds, with the paired interval, or a dash."""
    ours, theirs = (over_seeds([of for run in same if (of := measure(run))]) for same in (seeds, references))
    if not ours or not theirs:
        return "-"
    pairs = [a - b for a, b in zip(ours, theirs, strict=True)]
    return f"{fmean(pairs):+.3f} {in_brackets(pairs, bounds)}"


def differences(runs: list[Run], beside: str) -> str:
    """Markdown of how far arms are above one of them, on the same prompts: means over seeds, with 95 % intervals."""
    arms = runs_by_arm(runs)
    if beside not in arms:
        return ""
    lengths = sorted({c["length"] for c in runs[0]["asked"]})
    measures: dict[str, Callable[[Run], list[float]]] = {
        "short text": short_text,
        "SQuAD": squad,
        "replies": reply_losses,
        "ended": ended,
    }
    for test in TESTS:
        measures |= {f"{test} at {n}": partial(scores, test=test, length=n) for n in lengths}
    measures = {name: measure for name, measure in measures.items() if measure(arms[beside][0])}
    lines = head(["arm", *measures])
    for arm, seeds in arms.items():
        if arm == beside:
            continue
        row = [f"{arm}, {len(seeds)} and {len(arms[beside])} seeds"]
        for name, measure in measures.items():
            row.append(beyond(seeds, arms[beside], measure, None if name == "replies" else SHARES))
        lines.append(markdown_row(row))
    conditions = f"Right answers more than {beside}, of each prompt, and the paired 95 % interval"
    if "replies" in measures:
        conditions += "; replies: nats a token that the native model finds them likelier"
    return "\n".join([f"{conditions}:", "", *lines])


def by_prompts(runs: list[Run]) -> list[list[Run]]:
    """Runs on the same prompts. One that was cut off before its last prompts is with those that answered them too."""
    asked = [{(run["question_seed"], *_cell_of(c)) for c in run["asked"]} for run in runs]
    groups: dict[int, list[Run]] = {}
    for run, own in zip(runs, asked, strict=True):
        most = max((others for others in asked if others >= own), key=len)
        groups.setdefault(asked.index(most), []).append(run)
    return list(groups.values())


def _cell_of(cell: dict[str, Any]) -> tuple[Any, ...]:
    return cell["test"], cell["chat"], cell["length"], len(cell["scores"])


def paragraph_table(runs: list[Run], beside: str) -> str:
    """Markdown of SQuAD and short text, which all runs are asked alike; of runs with one arm and seed the last counts.

    Empty without SQuAD of the arm beside.
    """
    last = {(run["arm"], run["seed"]): run for run in runs if squad(run)}
    arms = runs_by_arm(list(last.values()))
    if beside not in arms:
        return ""
    measures = {"SQuAD": squad, "short text": short_text}
    lines = head(["arm", "seeds", *(name for measure in measures for name in (measure, f"more than {beside}"))])
    for arm, seeds in arms.items():
        row = [arm, " ".join(sorted(str(run["seed"]) for run in seeds))]
        for measure in measures.values():
            row.append(cell([measure(run) for run in seeds], None, 3))
            row.append("-" if arm == beside else beyond(seeds, arms[beside], measure))
        lines.append(markdown_row(row))
    return "\n".join(lines)


def tables(runs: list[Run], beside: str | None = None) -> str:
    """One table for each set of prompts, or with `beside` one of differences from that arm; then one of SQuAD."""
    of_prompts = table if beside is None else partial(differences, beside=beside)
    groups = by_prompts(runs)
    texts = [of_prompts(same) for same in groups]
    if sum(any(map(squad, same)) for same in groups) > 1:
        texts.append(paragraph_table(runs, beside or "native"))
    return "\n\n".join(text for text in texts if text)
