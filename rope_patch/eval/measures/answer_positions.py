"""Accuracy by the position of the answer in the prompt."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar, Self

from ..results.figures import HEIGHT, Figure, add_legend, compact, new_figure
from ..results.result import Result
from .base import Measure
from .retrieval_grid import RetrievalGrid

if TYPE_CHECKING:
    from ..suite import EvalPlan


@dataclass(frozen=True)
class AnswerPositionAccuracy(Result):
    """Accuracy by the position of the answer in the prompt, for each kind of prompt and each length.

    Args:
        curves: one curve for each kind and length, as {kind, length, accuracy, count, mid_third_gap}. Bins are equal
            parts of the prompt: `accuracy` [n_bins] is the mean score in each, None without a prompt, and `count`
            [n_bins] the number of prompts. `mid_third_gap` is the accuracy for answers in the middle third minus that
            in the outer thirds, None if either has no prompt.
    """

    title: ClassVar[str] = "Accuracy by answer position"
    column: ClassVar[str] = "accuracy"

    curves: list[dict[str, Any]]

    def headline(self) -> dict[str, float]:
        return {
            f"{c['kind']} at {c['length']}, mid-third gap": c["mid_third_gap"]
            for c in self.curves
            if c["mid_third_gap"] is not None
        }

    def table(self) -> list[dict[str, Any]]:
        return [
            {
                "kind": c["kind"],
                "length": c["length"],
                "first": k / len(c["count"]),
                "end": (k + 1) / len(c["count"]),
                "accuracy": accuracy,
                "count": n,
            }
            for c in self.curves
            for k, (accuracy, n) in enumerate(zip(c["accuracy"], c["count"], strict=True))
        ]

    @classmethod
    def figure(cls, results: Mapping[str, Self]) -> Figure:
        places = [(c["kind"], c["length"]) for r in results.values() for c in r.curves]
        kinds, lengths = list(dict.fromkeys(kind for kind, _ in places)), sorted({length for _, length in places})
        figure, all_axes = new_figure(len(lengths), max(HEIGHT, 1 + 1.6 * len(kinds)), row_heights=[1] * len(kinds))
        panels = dict(zip(product(kinds, lengths), all_axes, strict=True))
        for label, result in results.items():
            for curve in result.curves:
                draw_by_place(panels[curve["kind"], curve["length"]], curve, label)
        for kind in kinds:
            panels[kind, lengths[0]].set_ylabel(kind)
        for length in lengths:
            panels[kinds[0], length].set_title(f"{compact(length)} tokens")
        figure.suptitle("accuracy by position of the answer: 0 is the start of the prompt, 1 its end")
        add_legend(figure, all_axes[0])
        return figure

    @classmethod
    def readings(cls, results: Mapping[str, Self]) -> list[str]:
        gaps = [sentence for label, result in results.items() for sentence in result.gaps(label)]
        counts = [n for r in results.values() for c in r.curves for n in c["count"] if n]
        n = "a single prompt" if max(counts) == 1 else f"at most {max(counts)} prompts"
        return [
            *gaps,
            f"Each point is the mean of {n}. A curve is flat if the model finds the answer equally often everywhere, "
            "and also if it finds none.",
        ]

    def gaps(self, label: str) -> list[str]:
        """The gap between middle and outer thirds at each length, one sentence for each kind."""
        gaps: dict[str, list[str]] = {}
        for c in self.curves:
            if c["mid_third_gap"] is not None:
                gaps.setdefault(c["kind"], []).append(f"{100 * c['mid_third_gap']:+.0f} at {c['length']} tokens")
        return [
            f"{label}, {kind}: accuracy in the middle third of the prompt minus that in the outer thirds, in points: "
            f"{', '.join(by_length)}."
            for kind, by_length in gaps.items()
        ]


def draw_by_place(axes: Any, curve: Mapping[str, Any], label: str) -> None:
    """Draw one of `AnswerPositionAccuracy.curves` without the bins that have no prompt."""
    known = [((k + 0.5) / len(curve["count"]), y) for k, y in enumerate(curve["accuracy"]) if y is not None]
    axes.plot([x for x, _ in known], [y for _, y in known], marker="o", markersize=4, label=label)
    axes.set(xlim=(0, 1), ylim=(-0.02, 1.02), xticks=[0, 0.5, 1], yticks=[0, 0.5, 1])
    axes.grid(alpha=0.25)


def accuracy_by_answer_position(
    grids: RetrievalGrid | Iterable[RetrievalGrid], *, n_bins: int = 10
) -> AnswerPositionAccuracy:
    """Mean score of the prompts of each kind and length in `n_bins` equal bins of answer position / prompt length.

    Source: RPSD, arXiv:2604.14339, accuracy by answer position.
    """
    curves = []
    for grid in [grids] if isinstance(grids, RetrievalGrid) else grids:
        for length in grid.lengths:
            pairs = list(zip(grid.places_at(length), grid.at(length), strict=True))
            bins: list[list[float]] = [[] for _ in range(n_bins)]
            for place, score in pairs:
                bins[min(int(place * n_bins), n_bins - 1)].append(score)
            middle = [s for p, s in pairs if 1 / 3 <= p < 2 / 3]
            outer = [s for p, s in pairs if not 1 / 3 <= p < 2 / 3]
            curves.append(
                {
                    "kind": grid.kind,
                    "length": length,
                    "accuracy": [sum(b) / len(b) if b else None for b in bins],
                    "count": [len(b) for b in bins],
                    "mid_third_gap": sum(middle) / len(middle) - sum(outer) / len(outer) if middle and outer else None,
                }
            )
    return AnswerPositionAccuracy(curves)


def _check(plan: "EvalPlan", *_: object) -> None:
    before = plan.chosen[: plan.measures.index(POSITION.name)]
    if not any(measure.result is RetrievalGrid for measure in before):
        raise ValueError("position needs the answers to retrieval prompts: name passkey or a niah before it.")


POSITION = Measure(
    name="position",
    result=AnswerPositionAccuracy,
    run=lambda job: accuracy_by_answer_position([r for r in job.done.values() if isinstance(r, RetrievalGrid)]),
    flag="niah",
    by_default=True,
    settings=("trials", "depths", "seed", "chat_template", "backend", "measures", "lengths"),
    check=_check,
)
