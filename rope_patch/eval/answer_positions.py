"""Accuracy by the position of the answer in the prompt."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from .result import Result
from .retrieval_grid import RetrievalGrid

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class AnswerPositionAccuracy(Result):
    """Accuracy by where in the prompt the answer stands.

    Args:
        edges: bounds of the bins, as shares of the prompt, 0 to 1.
        accuracy: mean score of each bin; None where no prompt fell into it.
        count: prompts in each bin.
        mid_third_gap: accuracy of answers in the middle third minus that in the outer thirds; None without either.
    """

    title: ClassVar[str] = "Accuracy by answer position"
    column: ClassVar[str] = "accuracy"

    edges: list[float]
    accuracy: list[float | None]
    count: list[int]
    mid_third_gap: float | None

    @property
    def spread(self) -> float:
        """Best bin minus worst."""
        known = [a for a in self.accuracy if a is not None]
        return max(known) - min(known)

    def headline(self) -> dict[str, float]:
        gap = {} if self.mid_third_gap is None else {"mid-third gap": self.mid_third_gap}
        return {"spread over answer positions": self.spread, **gap}

    def table(self) -> list[dict[str, Any]]:
        return [
            {"first": a, "end": b, "accuracy": accuracy, "count": n}
            for a, b, accuracy, n in zip(self.edges, self.edges[1:], self.accuracy, self.count, strict=False)
        ]

    @classmethod
    def figure(cls, results: Mapping[str, Self]) -> "Figure":
        from .figures import add_legend, new_figure

        figure, (axes,) = new_figure()
        for label, result in results.items():
            middles = [(a + b) / 2 for a, b in zip(result.edges, result.edges[1:], strict=False)]
            known = [(m, a) for m, a in zip(middles, result.accuracy, strict=True) if a is not None]
            axes.plot(*zip(*known, strict=True), marker="o", markersize=4, label=label)
        axes.set(
            title="accuracy by place of the answer", xlabel="answer position over prompt length", ylabel="accuracy"
        )
        axes.set_ylim(0, 1.02)
        axes.set_xlim(0, 1)
        axes.grid(alpha=0.25)
        add_legend(figure, axes)
        return figure

    @classmethod
    def readings(cls, results: Mapping[str, Self]) -> list[str]:
        sentences = [
            f"{label}: bins differ by up to {100 * r.spread:.0f} points"
            + (
                "."
                if r.mid_third_gap is None
                else f"; answers in the middle third score {100 * r.mid_third_gap:+.0f} points."
            )
            for label, r in results.items()
        ]
        return [*sentences, "A model that reads all positions alike is flat."]


def accuracy_by_answer_position(
    grids: RetrievalGrid | Iterable[RetrievalGrid], *, n_bins: int = 10
) -> AnswerPositionAccuracy:
    """Pool prompts of one or several grids into `n_bins` equal bins of answer position over prompt length.

    Source: RPSD, arXiv:2604.14339, accuracy by answer position.
    """
    pooled = [grids] if isinstance(grids, RetrievalGrid) else list(grids)
    pairs = [pair for g in pooled for pair in zip(g.places, g.scores, strict=True)]
    bins: list[list[float]] = [[] for _ in range(n_bins)]
    for place, score in pairs:
        bins[min(int(place * n_bins), n_bins - 1)].append(score)
    middle = [s for p, s in pairs if 1 / 3 <= p < 2 / 3]
    outer = [s for p, s in pairs if not 1 / 3 <= p < 2 / 3]
    gap = sum(middle) / len(middle) - sum(outer) / len(outer) if middle and outer else None
    return AnswerPositionAccuracy(
        [k / n_bins for k in range(n_bins + 1)],
        [sum(b) / len(b) if b else None for b in bins],
        [len(b) for b in bins],
        gap,
    )
