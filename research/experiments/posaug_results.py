"""Tables of what research/experiments/posaug_from_scratch.py found: what its --table prints.

Figures are means over seeds. Behind those of losses and exams stands the 95 % interval of the difference from the
baseline of the same seeds, paired over spans or exams, each of which counts by its mean over seeds (and over questions,
as those about one text are no independent prompts). A gain of context is a difference itself: behind it stands its own
interval over spans.
"""

from collections.abc import Callable
from statistics import fmean
from typing import Any

from paired_results import head, in_brackets, over_seeds, row, seed_pairs
from result_lines import held, orderings, runs_by_arm, spread
from rpsd_far_results import cells_of, exam_table, place_table, seed_table

Run = dict[str, Any]

# (metric, the arm that is lower, the arm that is higher, the paper's figures), without what differs by less than 5 %.
# Cliffs are those of its ablations at 10.6M (measured at 8K), penalties and gains those at 42.5M (at 16K).
ORDERINGS = [
    ("cliff", "uniform", "baseline", "1.07 < 2.28"),
    ("cliff", "step", "uniform", "0.72 < 1.07"),
    ("cliff", "step 1/16..16", "step", "0.24 < 0.72"),
    ("cliff", "log-uniform", "uniform", "0.96 < 1.07; 0.18 > 0.06 at 42.5M"),
    ("cliff", "uniform", "upper-only", "1.07 < 1.15"),
    ("cliff", "upper-only", "downscale-only", "1.15 < 2.17"),
    ("cliff", "uniform", "downscale-only", "1.07 < 2.17"),
    ("cliff", "top", "bottom", "1.50 < 2.36"),
    ("cliff", "uniform", "top", "1.07 < 1.50"),
    ("cliff", "independent", "uniform", "0.73 < 1.07"),
    ("cliff", "fixed-4", "uniform", "0.58 < 1.07"),
    ("cliff", "random-base", "baseline", "1.09 < 2.28"),
    ("penalty", "uniform", "rpe", "1.4 % < 14.3 %, of 42.5M"),
    ("gain", "baseline", "uniform", "-0.71 < 2.51, of 42.5M, by the paper's own measure"),
]


def penalties(runs: list[Run]) -> dict[tuple[str, int], float]:
    """(arm, seed) -> rise of the loss within the window over the baseline of the same seed, in percent."""
    baseline = {r["seed"]: r["in_window"] for r in runs if r["arm"] == "baseline"}
    return {
        (r["arm"], r["seed"]): 100 * (r["in_window"] / baseline[r["seed"]] - 1) for r in runs if r["seed"] in baseline
    }


def summary(runs: list[Run]) -> str:
    """Markdown: means over seeds with half of their span, and the paper's orderings seed by seed."""
    penalty = penalties(runs)
    by_arm = runs_by_arm(runs)
    longest = max(runs, key=lambda run: run["tokens"])
    window, length = runs[0]["window"], runs[0]["spans"][1]
    lines = [
        f"{longest['parameters'] / 1e6:.1f}M parameters without embeddings, {longest['tokens'] / 1e6:.0f}M tokens "
        f"({longest['epochs']:.1f} epochs), window {window}, {runs[0]['spans'][0]} spans of {length}, {runs[0]['gpu']}",
        "",
        f"| arm | seeds | loss 64..{window} | penalty % | cliff | G({length}), exact | tokens/s | GiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for arm, same in by_arm.items():
        cost = [penalty[arm, r["seed"]] for r in same if (arm, r["seed"]) in penalty]
        cells = [spread([r["in_window"] for r in same], 3), spread(cost, 2) if cost else "-"]
        cells += [spread([r["cliff"] for r in same], 3), spread([r["gain"] for r in same], 3)]
        rates = [r["tokens_per_second"] for r in same if r.get("tokens_per_second")]
        peak = max((r["peak_gib"] for r in same if "peak_gib" in r), default=None)  # what is only read has none
        cells += [f"{fmean(rates):,.0f}" if rates else "-", "-" if peak is None else f"{peak:.1f}"]
        lines.append(f"| {arm} | {len(same)} | " + " | ".join(cells) + " |")

    def value(run: Run, metric: str) -> float | None:
        return penalty.get((run["arm"], run["seed"])) if metric == "penalty" else run[metric]

    lines += ["", *orderings(ORDERINGS, runs, value)]
    cliffs = {(r["arm"], r["seed"]): r["cliff"] for r in runs}
    both = [s for s in sorted({r["seed"] for r in runs}) if {("baseline", s), ("uniform", s)} <= set(cliffs)]
    tenth = held([cliffs["uniform", s] <= cliffs["baseline", s] / 10 for s in both])
    lines.append(f"| cliff of uniform at most a tenth of the baseline's | 0.060 and 1.915 | {tenth} |")
    cheap = held([penalty["uniform", s] <= 2 for s in both])
    lines.append(f"| penalty of uniform at most 2 % | 1.8 % | {cheap} |")
    return "\n".join(lines)


# of arms that read text with exams among its rows; the paper's are of passkeys at 8K, of 113M, and of YaRN at 1B
FURTHER = [
    ("exams beyond the window", "baseline", "uniform", "48.4 < 67.6"),
    ("cliff", "retrofit", "baseline", "0.45 < 2.84"),
    ("gain by the paper's form", "uniform", "uniform, YaRN", "2.72 < 2.99"),
    ("gain by the paper's form", "baseline, YaRN", "uniform, YaRN", "1.49 < 2.99"),
]


def tables(runs: list[Run]) -> str:
    """Markdown: the summary, and what lines have by span and by exam."""
    parts = [summary(runs)]
    known = [run for run in runs if "of_spans" in run]
    by_arm = runs_by_arm(sorted(known, key=lambda run: run["seed"]))
    if known:
        parts += [loss_table(by_arm), gain_table(by_arm)]
    if examined := runs_by_arm([run for same in by_arm.values() for run in same if run["exams"]]):
        cells = cells_of(next(iter(examined.values()))[0])
        parts += [exam_table(examined, "baseline"), seed_table(examined, cells), place_table(examined, cells)]
    if known:
        parts.append("\n".join(orderings(FURTHER, known, further)))
    return "\n\n".join(parts)


def further(run: Run, metric: str) -> float | None:
    """A metric of FURTHER."""
    if metric == "cliff":
        return run["cliff"]
    if metric == "gain by the paper's form":
        return fmean(value for gain in run["gains"] for value in gain["paper"])
    beyond = [c["marks"] for c in run["exams"] if c["length"] > run["window"]]
    return fmean(right for exams in beyond for exam in exams for _, right in exam) if beyond else None


def shown(value: float, differences: list[float]) -> str:
    """A figure with the interval of the mean of these differences."""
    if len(differences) < 2:
        return f"{value:.3f}"
    return f"{value:.3f} {in_brackets(differences, None)}"


def loss_table(by_arm: dict[str, list[Run]]) -> str:
    """Markdown: losses within the window and beyond it, and the cliff between them."""
    metrics: dict[str, Callable[[Run], list[float]]] = {
        "loss within the window": lambda run: [span["in_window"] for span in run["of_spans"]],
        "loss beyond it": lambda run: [span["beyond"] for span in run["of_spans"]],
        "cliff": lambda run: [span["beyond"] - span["in_window"] for span in run["of_spans"]],
    }
    lines = head(["arm", "seeds", *metrics])
    for arm, same in by_arm.items():
        pairs = [] if arm == "baseline" else seed_pairs(same, by_arm.get("baseline", []))
        cells = []
        for metric in metrics.values():
            ours, theirs = (over_seeds([metric(pair[k]) for pair in pairs]) for k in (0, 1))
            differences = [a - b for a, b in zip(ours, theirs, strict=True)]
            cells.append(shown(fmean(over_seeds([metric(run) for run in same])), differences))
        lines.append(row([arm, str(len(same)), *cells]))
    n_spans = len(next(iter(by_arm.values()))[0]["of_spans"])
    return "\n".join([*lines, "", f"{n_spans} spans a seed; in brackets, from the baseline of the same seeds."])


def gain_table(by_arm: dict[str, list[Run]]) -> str:
    """Markdown: the gain from context in both forms, by the tokens of a chunk."""
    chunks = [gain["chunk"] for gain in next(iter(by_arm.values()))[0]["gains"]]
    names = [f"{form}, chunks of {chunk}" for form in ("exact", "paper") for chunk in chunks]
    lines = head(["gain", "seeds", *names])

    def of_spans(run: Run, form: str, chunk: int) -> list[float]:
        (gain,) = (gain for gain in run["gains"] if gain["chunk"] == chunk)
        return gain[form]

    for arm, same in by_arm.items():
        cells = []
        for form in ("exact", "paper"):
            for chunk in chunks:
                means = over_seeds([of_spans(run, form, chunk) for run in same])
                cells.append(shown(fmean(means), means))
        lines.append(row([arm, str(len(same)), *cells]))
    return "\n".join([*lines, "", "Nats a token; in brackets, of the gain itself, over spans."])
