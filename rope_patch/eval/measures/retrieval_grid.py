"""Accuracy of retrieval by length, depth and wording: the result of `passkey` and `niah`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

from ..results.result import Pairs, Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class RetrievalGrid(Result):
    """Accuracy by length and depth, of what a model writes and, beside it, teacher-forced.

    As written: the model writes its answer token by token, each from its own choices before, and the numbers must be in
    it. Teacher-forced: the right answer is put behind the prompt, and a number counts if each of its digits is the
    model's first choice behind the right tokens before.

    Args:
        kind: of needle, as in `make_prompt`.
        lengths: tokens of a prompt and its answer together.
        depths: place of the needle, 0 the start, 1 right before the question.
        accuracy: [n_lengths][n_depths], mean score as written, 0 to 1.
        trials: prompts a cell.
        places: [n_prompts], token index of the answer over the length of its prompt, in [0, 1].
        scores: [n_prompts], each prompt's score as written, in the same order: length by length, depth by depth.
        wordings: [n_prompts], the number of each prompt's phrasing in `rope_patch.prompts.wordings`.
        prompt_hashes: [n_lengths], of all prompts of that length: where it is equal, two models were asked the same.
        replies: a few of each length, as {length, wording, question, expected, reply, score}.
        forced_scores: [n_prompts], each prompt's score teacher-forced; [] in results of before it was measured.
        said: what whoever answered has to say about the answers of each length, in sentences.
    """

    title: ClassVar[str] = "Retrieval: {measure}"
    column: ClassVar[str] = "as_written"

    kind: str
    lengths: list[int]
    depths: list[float]
    accuracy: list[list[float]]
    trials: int
    places: list[float]
    scores: list[float]
    wordings: list[int] = field(default_factory=list)
    prompt_hashes: list[str] = field(default_factory=list)
    replies: list[dict[str, Any]] = field(default_factory=list)
    forced_scores: list[float] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    @property
    def by_length(self) -> list[float]:
        """Mean accuracy at each length, as written."""
        return [sum(row) / len(row) for row in self.accuracy]

    @property
    def forced_by_length(self) -> list[float | None]:
        """Mean accuracy at each length, teacher-forced; None in results of before it was measured."""
        return [_mean(self.forced_at(length)) for length in self.lengths]

    def at(self, length: int) -> list[float]:
        """The score as written of each prompt of one length."""
        return self._of_length(self.scores, length)

    def forced_at(self, length: int) -> list[float]:
        """The score teacher-forced of each prompt of one length."""
        return self._of_length(self.forced_scores, length)

    def places_at(self, length: int) -> list[float]:
        """The place of the answer in each prompt of one length."""
        return self._of_length(self.places, length)

    def _of_length(self, values: list[float], length: int) -> list[float]:
        n = len(self.depths) * self.trials
        k = self.lengths.index(length)
        return values[k * n : (k + 1) * n]

    def by_wording(self, length: int) -> dict[int, float]:
        """Mean accuracy as written at one length by the number of the phrasing."""
        by_number = self._split_by_wording(self.at(length), length)
        return {wording: sum(scores) / len(scores) for wording, scores in by_number.items()}

    def _split_by_wording(self, scores: list[float], length: int) -> dict[int, list[float]]:
        n = len(self.depths) * self.trials
        k = self.lengths.index(length)
        by_number: dict[int, list[float]] = {}
        for wording, score in zip(self.wordings[k * n : (k + 1) * n], scores, strict=False):
            by_number.setdefault(wording, []).append(score)
        return dict(sorted(by_number.items()))

    def headline(self) -> dict[str, float]:
        written = {f"{self.kind} at {n}, as written": a for n, a in zip(self.lengths, self.by_length, strict=True)}
        forced = {
            f"{self.kind} at {n}, teacher-forced": a
            for n, a in zip(self.lengths, self.forced_by_length, strict=True)
            if a is not None
        }
        return {**written, **forced}

    def table(self) -> list[dict[str, Any]]:
        rows = []
        for n in self.lengths:
            written, forced = self.at(n), self.forced_at(n)
            for j, d in enumerate(self.depths):
                of_cell = slice(j * self.trials, (j + 1) * self.trials)
                rows.append(self._row(n, d, "all", written[of_cell], forced[of_cell]))
        for n in self.lengths:
            by_forced = self._split_by_wording(self.forced_at(n), n)
            for wording, scores in self._split_by_wording(self.at(n), n).items():
                rows.append(self._row(n, "all", wording, scores, by_forced.get(wording, [])))
        return rows + [self._row(n, "all", "all", self.at(n), self.forced_at(n)) for n in self.lengths]

    def _row(
        self, length: int, depth: float | str, wording: int | str, written: list[float], forced: list[float]
    ) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "length": length,
            "depth": depth,
            "wording": wording,
            "as_written": _mean(written),
            "teacher_forced": _mean(forced),
            "prompts": len(written),
        }

    def pairs(self, first: Self, window: int | None) -> list[Pairs]:
        hashes = [dict(zip(grid.lengths, grid.prompt_hashes, strict=False)) for grid in (first, self)]
        return [
            Pairs(first.at(n), self.at(n), "prompts", n, same=len({h[n] for h in hashes if n in h}) < 2)
            for n in first.lengths
            if n in self.lengths
        ]

    @classmethod
    def figure(cls, results: Mapping[str, Self]) -> "Figure":
        from ..results.figures import SHADES, compact, ink_on, new_figure

        figure, all_axes = new_figure(len(results), 6.0, row_heights=(3, 1.3))
        image: Any = None
        for axes, below, (label, grid) in zip(
            all_axes[: len(results)], all_axes[len(results) :], results.items(), strict=True
        ):
            cells = [[row[j] for row in grid.accuracy] for j in range(len(grid.depths))]
            image = axes.imshow(cells, vmin=0, vmax=1, cmap=SHADES, aspect="auto")
            ticks = [compact(n) for n in grid.lengths]
            size = 7 if len(ticks) * len(results) <= 24 else 5
            axes.set_xticks(range(len(ticks)), ticks, rotation=90 if len(ticks) * len(results) > 16 else 0)
            axes.set_yticks(range(len(grid.depths)), [f"{100 * d:.0f} %" for d in grid.depths])
            axes.set(title=label)
            for i, row in enumerate(grid.accuracy):
                for j, value in enumerate(row):
                    text = f"{100 * value:.0f}"
                    axes.text(i, j, text, ha="center", va="center", fontsize=size, color=ink_on(value))
            for i, n in enumerate(grid.lengths):
                means = list(grid.by_wording(n).values())
                if means:
                    below.plot(
                        [i, i],
                        [100 * min(means), 100 * max(means)],
                        color="0.65",
                        linestyle="-",
                        linewidth=5,
                        solid_capstyle="butt",
                    )
            middle = [100 * a for a in grid.by_length]
            below.plot(range(len(ticks)), middle, color="black", linestyle="-", marker="o", markersize=4)
            forced = [(i, 100 * a) for i, a in enumerate(grid.forced_by_length) if a is not None]
            if forced:
                below.plot(*zip(*forced, strict=True), color="black", linestyle=":", marker="x", markersize=5)
            below.set_xticks(range(len(ticks)), ticks, rotation=90 if len(ticks) * len(results) > 16 else 0)
            below.set(xlabel="length (tokens)", ylim=(-4, 104), xlim=(-0.5, len(ticks) - 0.5))
            below.grid(axis="y", alpha=0.25)
        all_axes[0].set_ylabel("depth of the needle")
        all_axes[len(results)].set_ylabel("mean; grey: from worst\nto best wording; dotted:\nteacher-forced")
        first = next(iter(results.values()))
        figure.suptitle(f"{first.kind}: accuracy in percent, as written; prompts a depth: {first.trials}")
        figure.colorbar(image, ax=all_axes[: len(results)], format=lambda share, _: f"{100 * share:.0f}")
        return figure

    @classmethod
    def readings(cls, results: Mapping[str, Self]) -> list[str]:
        sentences = []
        for label, grid in results.items():
            parts, forced = [], []
            for n, a, b in zip(grid.lengths, grid.by_length, grid.forced_by_length, strict=True):
                means = grid.by_wording(n).values()
                spread = "" if len(means) < 2 else f" ({100 * min(means):.0f} to {100 * max(means):.0f} by wording)"
                parts.append(f"{100 * a:.0f} % at {n} tokens{spread}")
                forced += [] if b is None else [f"{100 * b:.0f} % at {n} tokens"]
            sentences.append(f"{label}, as written: {', '.join(parts)}.")
            sentences += [f"{label}, teacher-forced: {', '.join(forced)}."] if forced else []
            sentences += [f"{label}: {sentence}" for sentence in dict.fromkeys(grid.said)]
        return [
            *sentences,
            "Each cell is the share of hidden values that the model writes in its answer. Teacher-forced, a value "
            "counts if each of its digits is the model's first choice behind the right ones before it: such a model "
            "can find the value, and may still begin another answer.",
        ]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
