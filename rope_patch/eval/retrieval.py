"""Passkey and needle-in-a-haystack grids, and accuracy by the position of the answer."""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

from torch import nn
from transformers import PreTrainedTokenizerBase

from .asking import ChatTemplate, uses_chat_template
from .cache import Remember, afresh, data_hash
from .generation import greedy_answers
from .needles import KINDS, Kind, RetrievalPrompt, make_prompt
from .progress import token_bar
from .result import Result
from .wordings import N_WORDINGS, PASSKEY_WORDINGS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NEW_TOKENS: dict[str, int] = {"passkey": 10, "single": 24, "multikey": 24, "ordinal": 24}


# the middles of ten equal parts, so that `accuracy_by_answer_position` finds as many prompts in each of its bins
DEPTHS = tuple((2 * k + 1) / 20 for k in range(10))
ALL_WORDINGS = tuple(range(N_WORDINGS))
_DRAWS = 100  # of one prompt, until it is none of those before

# token ids of the text that needles are hidden in: of each wording, or one for all
Haystacks = Sequence[Sequence[int]]


@dataclass(frozen=True)
class RetrievalGrid(Result):
    """Accuracy by length and depth of what a model writes, token by token, from its own choices.

    Args:
        kind: of needle, as in `make_prompt`.
        lengths: tokens of a prompt and its answer together.
        depths: place of the needle, 0 the start, 1 right before the question.
        accuracy: [n_lengths][n_depths], mean score, 0 to 1.
        trials: prompts a cell.
        places: [n_prompts], token index of the answer over the length of its prompt, in [0, 1].
        scores: [n_prompts], each prompt's score, in the same order: length by length, depth by depth.
        wordings: [n_prompts], the number of each prompt's phrasing in `rope_patch.eval.wordings`.
        prompt_hashes: [n_lengths], of all prompts of that length: where it is equal, two models were asked the same.
        replies: a few of each length, as {length, wording, question, expected, reply, score}.
    """

    title: ClassVar[str] = "Retrieval"
    column: ClassVar[str] = "accuracy"

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

    @property
    def by_length(self) -> list[float]:
        """Mean accuracy at each length."""
        return [sum(row) / len(row) for row in self.accuracy]

    def at(self, length: int) -> list[float]:
        """The score of each prompt of one length."""
        n = len(self.depths) * self.trials
        k = self.lengths.index(length)
        return self.scores[k * n : (k + 1) * n]

    def by_wording(self, length: int) -> dict[int, float]:
        """Mean accuracy at one length by the number of the phrasing."""
        n = len(self.depths) * self.trials
        k = self.lengths.index(length)
        found: dict[int, list[float]] = {}
        for wording, score in zip(self.wordings[k * n : (k + 1) * n], self.at(length), strict=False):
            found.setdefault(wording, []).append(score)
        return {wording: sum(found[wording]) / len(found[wording]) for wording in sorted(found)}

    def headline(self) -> dict[str, float]:
        return {f"{self.kind} at {n}": a for n, a in zip(self.lengths, self.by_length, strict=True)}

    def table(self) -> list[dict[str, Any]]:
        cells = [
            {
                "kind": self.kind,
                "length": n,
                "depth": d,
                "wording": "all",
                "accuracy": self.accuracy[i][j],
                "prompts": self.trials,
            }
            for i, n in enumerate(self.lengths)
            for j, d in enumerate(self.depths)
        ]
        wordings = [
            {
                "kind": self.kind,
                "length": n,
                "depth": "all",
                "wording": wording,
                "accuracy": accuracy,
                "prompts": self.wordings[: len(self.at(n))].count(wording),
            }
            for n in self.lengths
            for wording, accuracy in self.by_wording(n).items()
        ]
        means = [
            {
                "kind": self.kind,
                "length": n,
                "depth": "all",
                "wording": "all",
                "accuracy": a,
                "prompts": len(self.at(n)),
            }
            for n, a in zip(self.lengths, self.by_length, strict=True)
        ]
        return cells + wordings + means

    @classmethod
    def figure(cls, results: Mapping[str, Self]) -> "Figure":
        from .figures import SHADES, compact, ink_on, new_figure

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
            below.set_xticks(range(len(ticks)), ticks, rotation=90 if len(ticks) * len(results) > 16 else 0)
            below.set(xlabel="length (tokens)", ylim=(-4, 104), xlim=(-0.5, len(ticks) - 0.5))
            below.grid(axis="y", alpha=0.25)
        all_axes[0].set_ylabel("depth of the needle")
        all_axes[len(results)].set_ylabel("mean; grey: from\nworst to best wording")
        one = next(iter(results.values()))
        figure.suptitle(f"{one.kind}: accuracy in percent, as written; prompts a depth: {one.trials}")
        figure.colorbar(image, ax=all_axes[: len(results)])
        return figure

    @classmethod
    def readings(cls, results: Mapping[str, Self]) -> list[str]:
        said = []
        for label, grid in results.items():
            parts = []
            for n, a in zip(grid.lengths, grid.by_length, strict=True):
                means = grid.by_wording(n).values()
                spread = "" if len(means) < 2 else f" ({100 * min(means):.0f} to {100 * max(means):.0f} by wording)"
                parts.append(f"{100 * a:.0f} % at {n} tokens{spread}")
            said.append(f"{label}: {', '.join(parts)}.")
        return [*said, "Each cell is the share of hidden values that the model writes in its answer."]


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
        said = [
            f"{label}: bins differ by up to {100 * r.spread:.0f} points"
            + (
                "."
                if r.mid_third_gap is None
                else f"; answers in the middle third score {100 * r.mid_third_gap:+.0f} points."
            )
            for label, r in results.items()
        ]
        return [*said, "A model that reads all positions alike is flat."]


def passkey(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    lengths: Sequence[int],
    *,
    depths: Sequence[float] = DEPTHS,
    trials: int = 2,
    batch_size: int | None = None,
    seed: int = 0,
    chat_template: ChatTemplate = "auto",
    wordings: Sequence[int] = ALL_WORDINGS,
    progress: bool = True,
    remember: Remember = afresh,
) -> RetrievalGrid:
    """Repeat a five-digit key that stands somewhere in repeated filler sentences, as the model writes it.

    Args:
        model: a causal LM.
        tokenizer: of the model.
        lengths: tokens of prompt and reply together.
        depths: places of the key.
        trials: prompts a cell.
        batch_size: prompts held in memory and answered at once, at most; None means as many as fit.
        seed: of the keys.
        chat_template: whether the model is asked through the tokenizer's chat template: "on", "off", or "auto", if
            there is one. Lengths include it.
        wordings: numbers of the phrasings in `rope_patch.eval.wordings` that prompts take in turn.
        progress: whether to show a bar over tokens.
        remember: keeps each length as soon as it is done.

    Source: Mohtashami and Jaggi, Landmark Attention, 2023; used by PoSE, LongLoRA and PosAug.
    """
    prompts = _Prompts("passkey", tokenizer, lengths, depths, trials, 1, seed, chat_template, tuple(wordings))
    return _grid(model, prompts, passkey_haystacks(tokenizer, lengths), batch_size, progress, remember)


def niah(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    text: str | Iterable[str],
    lengths: Sequence[int],
    *,
    kind: Kind = "single",
    depths: Sequence[float] = DEPTHS,
    trials: int = 2,
    n_needles: int = 4,
    batch_size: int | None = None,
    seed: int = 0,
    chat_template: ChatTemplate = "auto",
    wordings: Sequence[int] = ALL_WORDINGS,
    progress: bool = True,
    remember: Remember = afresh,
) -> RetrievalGrid:
    """Needle in a haystack over lengths and depths, in the user's own text, as the model writes its answers.

    Args:
        model: a causal LM.
        tokenizer: of the model.
        text: haystack; documents are joined.
        lengths: tokens of prompt and reply together, so nothing is ever truncated.
        kind: "single", "multikey", "multivalue", "multiquery" or "ordinal", as in `rope_patch.eval.needles`.
        depths: places of the (first) needle asked for; others are drawn.
        trials: prompts a cell.
        n_needles: sentences hidden, for all kinds but "single".
        batch_size: prompts held in memory and answered at once, at most; None means as many as fit.
        seed: of keys, values and places.
        chat_template: whether the model is asked through the tokenizer's chat template: "on", "off", or "auto", if
            there is one. Lengths include it.
        wordings: numbers of the phrasings in `rope_patch.eval.wordings` that prompts take in turn.
        progress: whether to show a bar over tokens.
        remember: keeps each length as soon as it is done.

    Raises:
        ValueError: an unknown kind, depths outside [0, 1], or too little text.

    Source: Kamradt's needle in a haystack; RULER, arXiv:2404.06654 (multi-key, -value, -query); RPSD,
    arXiv:2604.14339 (ordinal).
    """
    n_needles = 1 if kind == "single" else n_needles
    prompts = _Prompts(kind, tokenizer, lengths, depths, trials, n_needles, seed, chat_template, tuple(wordings))
    return _grid(model, prompts, text_haystacks(tokenizer, text, lengths), batch_size, progress, remember)


def passkey_haystacks(tokenizer: PreTrainedTokenizerBase, lengths: Sequence[int]) -> Haystacks:
    """Each wording's filler sentences, repeated until they are enough for the longest of `lengths`."""
    fillers = [tokenizer(wording.filler, add_special_tokens=False)["input_ids"] for wording in PASSKEY_WORDINGS]
    return [filler * (max(lengths, default=0) // len(filler) + 1) for filler in fillers]


def text_haystacks(tokenizer: PreTrainedTokenizerBase, text: str | Iterable[str], lengths: Sequence[int]) -> Haystacks:
    """Documents, one after the other, until they are enough for the longest of `lengths`, for all wordings."""
    haystack: list[int] = []
    for document in [text] if isinstance(text, str) else text:
        haystack += tokenizer(document, add_special_tokens=False, verbose=False)["input_ids"]
        if len(haystack) >= max(lengths, default=0):
            break
    return [haystack]


def check_retrieval(
    kind: Kind,
    tokenizer: PreTrainedTokenizerBase,
    texts: Iterable[str],
    lengths: Sequence[int],
    chat_template: ChatTemplate,
    *,
    n_needles: int = 4,
) -> None:
    """Make one prompt of each length and wording, without a model.

    Raises:
        ValueError: a length that is too short for needles and question, or a text that is too short for the length.
    """
    passkeys = kind == "passkey"
    haystack = passkey_haystacks(tokenizer, lengths) if passkeys else text_haystacks(tokenizer, texts, lengths)
    n_needles = 1 if kind in ("passkey", "single") else n_needles
    trials = len(ALL_WORDINGS)
    prompts = _Prompts(kind, tokenizer, lengths, (0.5,), trials, n_needles, 0, chat_template, ALL_WORDINGS)
    for length in lengths:
        prompts.of_length(length, haystack)


def shortest_prompt(
    kind: Kind, tokenizer: PreTrainedTokenizerBase, chat_template: ChatTemplate, *, n_needles: int = 4
) -> int:
    """Tokens that a prompt of this kind takes at least, in its longest wording and with a sentence of haystack."""
    n_needles = 1 if kind in ("passkey", "single") else n_needles
    prompts = _Prompts(kind, tokenizer, (0,), (0.5,), 1, n_needles, 0, chat_template, ALL_WORDINGS)
    chat = uses_chat_template(tokenizer, chat_template)
    sentence = tokenizer(PASSKEY_WORDINGS[0].filler, add_special_tokens=False)["input_ids"]
    return prompts.new_tokens + max(
        len(
            make_prompt(
                kind,
                tokenizer,
                sentence,
                n_tokens=None,
                depth=0.5,
                n_needles=n_needles,
                rng=random.Random(trial),
                chat=chat,
                wording=trial % N_WORDINGS,
            ).ids
        )
        for trial in range(4 * N_WORDINGS)
    )


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


@dataclass(frozen=True)
class _Prompts:
    """The prompts of a grid; arguments as in `niah`."""

    kind: Kind
    tokenizer: PreTrainedTokenizerBase
    lengths: Sequence[int]
    depths: Sequence[float]
    trials: int
    n_needles: int
    seed: int
    chat_template: ChatTemplate
    wordings: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {self.kind!r}.")
        if not self.lengths or not self.depths or self.trials < 1:
            raise ValueError("lengths and depths must not be empty, and trials at least 1.")
        if not all(0 <= d <= 1 for d in self.depths):
            raise ValueError(f"depths must be in [0, 1], got {list(self.depths)}.")
        if not self.wordings or not set(self.wordings) <= set(ALL_WORDINGS):
            raise ValueError(f"wordings must be some of {list(ALL_WORDINGS)}, got {list(self.wordings)}.")

    @property
    def new_tokens(self) -> int:
        """Tokens that a reply may have."""
        return _NEW_TOKENS.get(self.kind, 16 * self.n_needles)

    @property
    def cells(self) -> int:
        """Prompts of one length."""
        return len(self.depths) * self.trials

    def of_length(self, length: int, haystacks: Haystacks) -> list[RetrievalPrompt]:
        """All prompts of one length, depth by depth, each another one, in each wording as often as in the others.

        They do not depend on the model, only on its tokenizer: the k-th prompt of two models is the same.
        """
        seen: set[tuple[int, ...]] = set()
        prompts: list[RetrievalPrompt] = []
        for depth in self.depths:
            for trial in range(self.trials):
                # in turn through depths and trials: each wording is asked at all depths
                wording = self.wordings[len(prompts) % len(self.wordings)]
                prompt = self._drawn(length, depth, trial, wording, haystacks[wording % len(haystacks)], seen)
                seen.add(tuple(prompt.ids))
                prompts.append(prompt)
        return prompts

    def _drawn(
        self, length: int, depth: float, trial: int, wording: int, haystack: Sequence[int], seen: set[tuple[int, ...]]
    ) -> RetrievalPrompt:
        drawn = f"{self.seed} {self.kind} {length} {depth} {trial}"
        for again in range(_DRAWS):
            prompt = make_prompt(
                self.kind,
                self.tokenizer,
                haystack,
                n_tokens=length - self.new_tokens,
                depth=depth,
                n_needles=self.n_needles,
                rng=random.Random(f"{drawn} {again}" if again else drawn),
                chat=uses_chat_template(self.tokenizer, self.chat_template),
                wording=wording,
            )
            if tuple(prompt.ids) not in seen:
                return prompt
        raise ValueError(f"there are no {self.trials} different prompts of {length} tokens: ask for fewer trials.")

    def record(self, length: int, prompts: Sequence[RetrievalPrompt], replies: Sequence[str]) -> dict[str, Any]:
        """What is kept of one length beside scores and places."""
        wordings = [p.wording for p in prompts]
        # of each wording one, from all depths
        shown = [
            min(
                (i for i, w in enumerate(wordings) if w == wording),
                key=lambda i, k=k: abs(i / len(prompts) - (k + 0.5) / len(self.wordings)),  # type: ignore[misc]
            )
            for k, wording in enumerate(self.wordings)
            if wording in wordings
        ]
        return {
            "wordings": wordings,
            "prompt_hash": data_hash([p.ids for p in prompts]),
            "replies": [
                {
                    "length": length,
                    "wording": prompts[i].wording,
                    "question": prompts[i].question,
                    "expected": ", ".join(prompts[i].answers),
                    "reply": replies[i],
                    "score": prompts[i].score(replies[i]),
                }
                for i in shown
            ],
        }


def _grid(
    model: nn.Module, asked: _Prompts, haystack: Haystacks, batch_size: int | None, progress: bool, remember: Remember
) -> RetrievalGrid:
    accuracy, places, scores = [], [], []
    wordings: list[int] = []
    hashes: list[str] = []
    examples: list[dict[str, Any]] = []
    through, total = 0, asked.cells * sum(asked.lengths)
    with token_bar(model, total, asked.kind, show=progress) as done:
        for length in asked.lengths:

            def measure(length: int = length, before: int = through) -> dict[str, Any]:
                prompts = asked.of_length(length, haystack)
                # all in one call: what prompts share is read once
                replies = greedy_answers(
                    model,
                    asked.tokenizer,
                    [p.ids for p in prompts],
                    max_new_tokens=asked.new_tokens,
                    batch_size=batch_size,
                    done=lambda n: done(before + length * n),
                )
                found = [p.score(reply) for p, reply in zip(prompts, replies, strict=True)]
                kept = asked.record(length, prompts, replies)
                return {"scores": found, "places": [p.position / len(p.ids) for p in prompts], **kept}

            value = remember({"length": length}, measure)
            scores += value["scores"]
            places += value["places"]
            wordings += value["wordings"]
            hashes.append(value["prompt_hash"])
            examples += value["replies"]
            accuracy.append(
                [
                    sum(value["scores"][k : k + asked.trials]) / asked.trials
                    for k in range(0, len(value["scores"]), asked.trials)
                ]
            )
            through += asked.cells * length
            done(through)
    return RetrievalGrid(
        asked.kind,
        list(asked.lengths),
        list(asked.depths),
        accuracy,
        asked.trials,
        places,
        scores,
        wordings,
        hashes,
        examples,
    )
