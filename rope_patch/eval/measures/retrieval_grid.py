"""Accuracy of retrieval by length, depth and wording: the result of `passkey` and `niah`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from ..results.figures import SHADES, Figure, compact, ink_on, new_figure
from ..results.result import Pairs, Result

GIVEN = "with the answer given"
"""How readers are told of a teacher-forced score."""
_NUMBERS = {
    "passkey": "passkeys",
    "several": "passkeys of several people",
    "single": "single numbers hidden in text",
    "multikey": "keys among look-alikes",
    "multivalue": "numbers of one key",
    "multiquery": "numbers of several keys",
    "ordinal": "numbers asked for by their order",
}
"""Kind -> the numbers that its questions ask for."""
_FEW_TEXTS = "The passkeys of several people stand in few texts, and other texts may differ."


@dataclass(frozen=True)
class RetrievalGrid(Result):
    """Accuracy by length and depth, as written and teacher-forced.

    As written: the model writes its answer token by token, and the hidden numbers must be in it. Teacher-forced: the
    right answer follows the prompt, and a number counts if each of its digits is the model's most likely token there.

    Args:
        kind: kind of needle, as in `make_prompt`.
        lengths: tokens of a prompt and its answer together.
        depths: depths of the needle; 0 is the start, 1 right before the question.
        accuracy: [n_lengths][n_depths], mean score as written, 0 to 1.
        trials: prompts in each cell.
        places: [n_prompts], token index of the answer / length of its prompt, in [0, 1]. Prompts are ordered by length,
            depth and trial.
        scores: [n_prompts], score as written.
        wordings: [n_prompts], number of the wording in `rope_patch.prompts.wordings`.
        prompt_hashes: [n_lengths], hash of all prompts of a length. Two models with the same hash got the same prompts.
        replies: some replies of each length, as {length, wording, question, expected, reply, score}.
        forced_scores: [n_prompts], teacher-forced score.
        said: sentences about what answered, e.g. vLLM.
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
        return [_mean(row) for row in self.accuracy]

    @property
    def forced_by_length(self) -> list[float]:
        """Mean accuracy at each length, teacher-forced."""
        return [_mean(self.forced_scores[self._indices(length)]) for length in self.lengths]

    def at(self, length: int) -> list[float]:
        """The score as written of each prompt of one length."""
        return self.scores[self._indices(length)]

    def places_at(self, length: int) -> list[float]:
        """The relative position of the answer in each prompt of one length."""
        return self.places[self._indices(length)]

    def _indices(self, length: int) -> slice:
        n = len(self.depths) * self.trials
        k = self.lengths.index(length)
        return slice(k * n, (k + 1) * n)

    def by_wording(self, length: int) -> dict[int, float]:
        """Mean accuracy as written at one length, by the number of the wording."""
        return {w: _mean([self.scores[i] for i in prompts]) for w, prompts in self._by_wording(length).items()}

    def _by_wording(self, length: int) -> dict[int, list[int]]:
        """Wording -> indices of its prompts of one length."""
        wordings = range(len(self.wordings))[self._indices(length)]
        return {w: [i for i in wordings if self.wordings[i] == w] for w in sorted({self.wordings[i] for i in wordings})}

    def headline(self) -> dict[str, float]:
        written = {f"{self.kind} at {n}, as written": a for n, a in zip(self.lengths, self.by_length, strict=True)}
        forced = zip(self.lengths, self.forced_by_length, strict=True)
        return {**written, **{f"{self.kind} at {n}, {GIVEN}": a for n, a in forced}}

    def table(self) -> list[dict[str, Any]]:
        def row(length: int, depth: float | str, wording: int | str, prompts: Sequence[int]) -> dict[str, Any]:
            return {
                "kind": self.kind,
                "length": length,
                "depth": depth,
                "wording": wording,
                "as_written": _mean([self.scores[i] for i in prompts]),
                "teacher_forced": _mean([self.forced_scores[i] for i in prompts]),
                "prompts": len(prompts),
            }

        indices = {n: range(len(self.scores))[self._indices(n)] for n in self.lengths}
        by_depth = [
            row(n, d, "all", indices[n][j * self.trials : (j + 1) * self.trials])
            for n in self.lengths
            for j, d in enumerate(self.depths)
        ]
        by_wording = [row(n, "all", w, prompts) for n in self.lengths for w, prompts in self._by_wording(n).items()]
        return by_depth + by_wording + [row(n, "all", "all", indices[n]) for n in self.lengths]

    def pairs(self, first: Self, window: int | None) -> list[Pairs]:
        what, few_texts = _NUMBERS.get(self.kind, self.kind), self.kind == "several"
        hashes = [dict(zip(grid.lengths, grid.prompt_hashes, strict=False)) for grid in (first, self)]
        lengths = [n for n in first.lengths if n in self.lengths]
        cells = [
            Pairs(
                first.at(n),
                self.at(n),
                "prompts",
                n,
                same=len({h[n] for h in hashes if n in h}) < 2,
                sentence=f"{what} in {n:,} tokens: {{}} are found",
                note=_FEW_TEXTS if few_texts else "",
            )
            for n in lengths
        ]
        if few_texts and len(cells) > 1:  # so few questions a length show large changes only
            before = [score for cell in cells for score in cell.first]
            after = [score for cell in cells for score in cell.second]
            sizes = [f"{n:,}" for n in lengths]
            together = f"{what} in {', '.join(sizes[:-1])} and {sizes[-1]} tokens together: {{}} are found"
            name = f"{self.kind} in {', '.join(sizes)} tokens"
            cells.append(Pairs(before, after, "prompts", max(lengths), name=name, sentence=together, note=_FEW_TEXTS))
        return cells

    def figures(self, window: int | None) -> list[tuple[str, str, float]]:
        found = zip(self.lengths, self.by_length, strict=True)
        return [
            (f"{_NUMBERS.get(self.kind, self.kind)} found at {n:,} tokens", "%.0f %%", 100 * share)
            for n, share in found
        ]

    @classmethod
    def figure(cls, results: Mapping[str, Self]) -> Figure:
        figure, all_axes = new_figure(len(results), 6.0, row_heights=(3, 1.3))
        above, below = all_axes[: len(results)], all_axes[len(results) :]
        image: Any = None
        for cells, means, (label, grid) in zip(above, below, results.items(), strict=True):
            ticks = [compact(n) for n in grid.lengths]
            crowded = len(ticks) * len(results)
            # [n_depths][n_lengths]
            image = cells.imshow(list(zip(*grid.accuracy, strict=True)), vmin=0, vmax=1, cmap=SHADES, aspect="auto")
            cells.set_yticks(range(len(grid.depths)), [f"{100 * d:.0f} %" for d in grid.depths])
            cells.set(title=label)
            for i, row in enumerate(grid.accuracy):
                for j, value in enumerate(row):
                    style = {"fontsize": 7 if crowded <= 24 else 5, "color": ink_on(value)}
                    cells.text(i, j, f"{100 * value:.0f}", ha="center", va="center", **style)
            for i, n in enumerate(grid.lengths):
                spread = [100 * mean for mean in grid.by_wording(n).values()]
                if spread:
                    ends = [min(spread), max(spread)]
                    means.plot([i, i], ends, color="0.65", linestyle="-", linewidth=5, solid_capstyle="butt")
            places = range(len(ticks))
            means.plot(
                places, [100 * a for a in grid.by_length], color="black", linestyle="-", marker="o", markersize=4
            )
            forced = [100 * a for a in grid.forced_by_length]
            means.plot(places, forced, color="black", linestyle=":", marker="x", markersize=5)
            for axes in (cells, means):
                axes.set_xticks(places, ticks, rotation=90 if crowded > 16 else 0)
            means.set(xlabel="length (tokens)", ylim=(-4, 104), xlim=(-0.5, len(ticks) - 0.5))
            means.grid(axis="y", alpha=0.25)
        above[0].set_ylabel("depth of the needle")
        below[0].set_ylabel(f"mean; grey: worst to\nbest wording; dotted:\n{GIVEN}")
        first = next(iter(results.values()))
        prompts = "1 prompt" if first.trials == 1 else f"{first.trials} prompts"
        figure.suptitle(f"{first.kind}: accuracy in percent, as written, {prompts} for each depth")
        figure.colorbar(image, ax=above, format=lambda share, _: f"{100 * share:.0f}")
        return figure

    @classmethod
    def readings(cls, results: Mapping[str, Self]) -> list[str]:
        sentences = []
        for label, grid in results.items():
            written = []
            for n, accuracy in zip(grid.lengths, grid.by_length, strict=True):
                means = grid.by_wording(n).values()
                spread = "" if len(means) < 2 else f" ({100 * min(means):.0f} to {100 * max(means):.0f} by wording)"
                written.append(f"{100 * accuracy:.0f} % at {n} tokens{spread}")
            forced = [
                f"{100 * a:.0f} % at {n} tokens" for n, a in zip(grid.lengths, grid.forced_by_length, strict=True)
            ]
            sentences.append(f"{label}, as written: {', '.join(written)}.")
            sentences.append(f"{label}, {GIVEN}: {', '.join(forced)}.")
            sentences += [f"{label}: {sentence}" for sentence in dict.fromkeys(grid.said)]
        return [
            *sentences,
            "Each cell is the share of hidden values that the model writes in its answer. With the answer given "
            "(teacher-forced), a value counts if each of its digits is the model's most likely token after the right "
            "digits before it. So a model can find a value and still begin another answer.",
        ]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
