"""Passkey and needle-in-a-haystack grids, and accuracy by the position of the answer."""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Self

from torch import nn
from transformers import PreTrainedTokenizerBase

from .asking import ChatTemplate, uses_chat_template
from .cache import Remember, afresh, data_hash
from .generation import ask_greedily
from .needles import KINDS, Kind, RetrievalPrompt, about_the_same, make_prompt, reply_tokens
from .progress import token_bar
from .reading import Question, Reply
from .result import Result
from .wordings import N_WORDINGS, PASSKEY_WORDINGS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# the middles of ten equal parts, so that `accuracy_by_answer_position` finds as many prompts in each of its bins
DEPTHS = tuple((2 * k + 1) / 20 for k in range(10))
ALL_WORDINGS = tuple(range(N_WORDINGS))
_DRAWS = 100  # of one prompt, until it is none of those before

Ask = Callable[[Sequence[Question], Callable[[int], None]], tuple[list[Reply], str]]
"""(questions, what is told how many are read) -> replies, and a sentence about who gave them or ""."""

# token ids of the text that needles are hidden in: of each wording, or one for all
Haystacks = Sequence[Sequence[int]]


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
        wordings: [n_prompts], the number of each prompt's phrasing in `rope_patch.eval.wordings`.
        prompt_hashes: [n_lengths], of all prompts of that length: where it is equal, two models were asked the same.
        replies: a few of each length, as {length, wording, question, expected, reply, score}.
        forced_scores: [n_prompts], each prompt's score teacher-forced; [] in results of before it was measured.
        said: what whoever answered has to say about the answers of each length, in sentences.
    """

    title: ClassVar[str] = "Retrieval"
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

    def _of_length(self, values: list[float], length: int) -> list[float]:
        n = len(self.depths) * self.trials
        k = self.lengths.index(length)
        return values[k * n : (k + 1) * n]

    def by_wording(self, length: int) -> dict[int, float]:
        """Mean accuracy as written at one length by the number of the phrasing."""
        found = self._split_by_wording(self.at(length), length)
        return {wording: sum(scores) / len(scores) for wording, scores in found.items()}

    def _split_by_wording(self, scores: list[float], length: int) -> dict[int, list[float]]:
        n = len(self.depths) * self.trials
        k = self.lengths.index(length)
        found: dict[int, list[float]] = {}
        for wording, score in zip(self.wordings[k * n : (k + 1) * n], scores, strict=False):
            found.setdefault(wording, []).append(score)
        return dict(sorted(found.items()))

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
            forced = [(i, 100 * a) for i, a in enumerate(grid.forced_by_length) if a is not None]
            if forced:
                below.plot(*zip(*forced, strict=True), color="black", linestyle=":", marker="x", markersize=5)
            below.set_xticks(range(len(ticks)), ticks, rotation=90 if len(ticks) * len(results) > 16 else 0)
            below.set(xlabel="length (tokens)", ylim=(-4, 104), xlim=(-0.5, len(ticks) - 0.5))
            below.grid(axis="y", alpha=0.25)
        all_axes[0].set_ylabel("depth of the needle")
        all_axes[len(results)].set_ylabel("mean; grey: from worst\nto best wording; dotted:\nteacher-forced")
        one = next(iter(results.values()))
        figure.suptitle(f"{one.kind}: accuracy in percent, as written; prompts a depth: {one.trials}")
        figure.colorbar(image, ax=all_axes[: len(results)])
        return figure

    @classmethod
    def readings(cls, results: Mapping[str, Self]) -> list[str]:
        said = []
        for label, grid in results.items():
            parts, forced = [], []
            for n, a, b in zip(grid.lengths, grid.by_length, grid.forced_by_length, strict=True):
                means = grid.by_wording(n).values()
                spread = "" if len(means) < 2 else f" ({100 * min(means):.0f} to {100 * max(means):.0f} by wording)"
                parts.append(f"{100 * a:.0f} % at {n} tokens{spread}")
                forced += [] if b is None else [f"{100 * b:.0f} % at {n} tokens"]
            said.append(f"{label}, as written: {', '.join(parts)}.")
            said += [f"{label}, teacher-forced: {', '.join(forced)}."] if forced else []
            said += [f"{label}: {sentence}" for sentence in dict.fromkeys(grid.said)]
        return [
            *said,
            "Each cell is the share of hidden values that the model writes in its answer. Teacher-forced, a value "
            "counts if each of its digits is the model's first choice behind the right ones before it: such a model "
            "can find the value, and may still begin another answer.",
        ]


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

    Source: Mohtashami and Jaggi, Landmark Attention, 2023; used by PoSE, LongLoRA and PosAug.
    """
    return retrieval(
        model,
        tokenizer,
        (),
        lengths,
        kinds=("passkey",),
        depths=depths,
        trials=trials,
        batch_size=batch_size,
        seed=seed,
        chat_template=chat_template,
        wordings=wordings,
        progress=progress,
    )["passkey"]


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
) -> RetrievalGrid:
    """Needle in a haystack over lengths and depths, in the user's own text, as the model writes its answers.

    Args:
        model: a causal LM.
        tokenizer: of the model.
        text: haystack; documents are joined.
        lengths: tokens of prompt and reply together, so nothing is ever truncated.
        kind: "single", "multikey", "multivalue", "multiquery" or "ordinal", as in `rope_patch.eval.needles`.
        depths: places of one needle asked for; others are drawn.
        trials: prompts a cell.
        n_needles: sentences hidden, for all kinds but "single".
        batch_size: prompts held in memory and answered at once, at most; None means as many as fit.
        seed: of keys, values and places.
        chat_template: whether the model is asked through the tokenizer's chat template: "on", "off", or "auto", if
            there is one. Lengths include it.
        wordings: numbers of the phrasings in `rope_patch.eval.wordings` that prompts take in turn.
        progress: whether to show a bar over tokens.

    Raises:
        ValueError: an unknown kind, depths outside [0, 1], or too little text.

    Source: Kamradt's needle in a haystack; RULER, arXiv:2404.06654 (multi-key, -value, -query); RPSD,
    arXiv:2604.14339 (ordinal).
    """
    return retrieval(
        model,
        tokenizer,
        text,
        lengths,
        kinds=(kind,),
        depths=depths,
        trials=trials,
        n_needles=n_needles,
        batch_size=batch_size,
        seed=seed,
        chat_template=chat_template,
        wordings=wordings,
        progress=progress,
    )[kind]


def retrieval(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    text: str | Iterable[str],
    lengths: Sequence[int],
    *,
    kinds: Sequence[Kind] = KINDS,
    depths: Sequence[float] = DEPTHS,
    trials: int = 2,
    n_needles: int = 4,
    batch_size: int | None = None,
    seed: int = 0,
    chat_template: ChatTemplate = "auto",
    wordings: Sequence[int] = ALL_WORDINGS,
    progress: bool = True,
    remember: Callable[[Kind], Remember] = lambda _: afresh,
    ask: Ask | None = None,
) -> dict[Kind, RetrievalGrid]:
    """The grids of `passkey` and `niah`, of several kinds at once: what their prompts share is read once.

    "multikey" and "multiquery" ask about the same texts, prompt by prompt, and so do "multivalue" and "ordinal". The
    prompts of one kind have texts of their own each, so that they are as independent as if the kind were asked alone.

    Args:
        model: a causal LM.
        tokenizer: of the model.
        text: haystack of all kinds but "passkey"; documents are joined.
        lengths: tokens of prompt and reply together.
        kinds: of needles, as in `rope_patch.eval.needles`.
        depths: places of one needle asked for.
        trials: prompts a cell.
        n_needles: sentences hidden, for all kinds but "passkey" and "single".
        batch_size: prompts held in memory and answered at once, at most; None means as many as fit.
        seed: of keys, values and places.
        chat_template: "on", "off", or "auto", as in `niah`.
        wordings: numbers of the phrasings that prompts take in turn.
        progress: whether to show a bar over tokens.
        remember: of a kind, what keeps each of its lengths as soon as it is done.
        ask: answers questions in place of `ask_greedily`, and says something about it in a sentence, or "".

    Returns:
        Kind -> grid.

    Raises:
        ValueError: an unknown kind, depths outside [0, 1], or too little text.
    """
    asked = {
        kind: _Prompts(
            kind, tokenizer, lengths, depths, trials, _n_needles(kind, n_needles), seed, chat_template, tuple(wordings)
        )
        for kind in kinds
    }
    haystacks = _haystacks(kinds, tokenizer, text, lengths)
    parts: dict[Kind, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    tokens = [len(kinds) * len(depths) * trials * length for length in lengths]
    with token_bar(model, sum(tokens), ", ".join(kinds), show=progress) as done:
        for k, length in enumerate(lengths):
            before = sum(tokens[:k])
            together = _Together(asked, haystacks, length, ask or _by_model(model, tokenizer, batch_size), done, before)
            for kind in kinds:
                parts[kind].append(remember(kind)({"length": length}, partial(together.part, kind)))
            done(before + tokens[k])
    return {kind: asked[kind].grid(parts[kind]) for kind in kinds}


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _n_needles(kind: Kind, n_needles: int) -> int:
    return 1 if kind in ("passkey", "single") else n_needles


def _haystacks(
    kinds: Sequence[Kind], tokenizer: PreTrainedTokenizerBase, text: str | Iterable[str], lengths: Sequence[int]
) -> dict[Kind, Haystacks]:
    """Of each kind; the text is tokenized once for all that are hidden in it."""
    of_text = text_haystacks(tokenizer, text, lengths) if set(kinds) - {"passkey"} else []
    return {kind: passkey_haystacks(tokenizer, lengths) if kind == "passkey" else of_text for kind in kinds}


def _by_model(model: nn.Module, tokenizer: PreTrainedTokenizerBase, batch_size: int | None) -> Ask:
    """The model itself answers."""
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id

    def ask(questions: Sequence[Question], done: Callable[[int], None]) -> tuple[list[Reply], str]:
        return ask_greedily(model, questions, pad_token=pad, batch_size=batch_size, done=done), ""

    return ask


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


def retrieval_prompts(
    kind: Kind,
    tokenizer: PreTrainedTokenizerBase,
    text: str | Iterable[str],
    length: int,
    *,
    depths: Sequence[float] = DEPTHS,
    trials: int = 2,
    n_needles: int = 4,
    seed: int = 0,
    chat_template: ChatTemplate = "auto",
    wordings: Sequence[int] = ALL_WORDINGS,
) -> list[RetrievalPrompt]:
    """What `retrieval` asks at one length, depth by depth, without a model; arguments as there."""
    haystacks = _haystacks((kind,), tokenizer, text, (length,))[kind]
    needles = _n_needles(kind, n_needles)
    prompts = _Prompts(kind, tokenizer, (length,), depths, trials, needles, seed, chat_template, tuple(wordings))
    return prompts.of_length(length, haystacks)


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
    haystack = _haystacks((kind,), tokenizer, texts, lengths)[kind]
    n_needles = _n_needles(kind, n_needles)
    trials = len(ALL_WORDINGS)
    prompts = _Prompts(kind, tokenizer, lengths, (0.5,), trials, n_needles, 0, chat_template, ALL_WORDINGS)
    for length in lengths:
        prompts.of_length(length, haystack)


def shortest_prompt(
    kind: Kind, tokenizer: PreTrainedTokenizerBase, chat_template: ChatTemplate, *, n_needles: int = 4
) -> int:
    """Tokens that a prompt of this kind takes at least, in its longest wording and with a sentence of haystack."""
    n_needles = _n_needles(kind, n_needles)
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
        return reply_tokens(self.kind, self.n_needles)

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
        drawn_as = about_the_same(self.kind, self.n_needles)[0]
        drawn = f"{self.seed} {drawn_as} {length} {depth} {trial}"
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

    def part(self, length: int, prompts: Sequence[RetrievalPrompt], replies: Sequence[Reply]) -> dict[str, Any]:
        """What is kept of one length."""
        texts = self.tokenizer.batch_decode([reply.written for reply in replies], skip_special_tokens=True)
        return {
            "scores": [p.score(text) for p, text in zip(prompts, texts, strict=True)],
            "forced_scores": [p.forced_score(reply.forced) for p, reply in zip(prompts, replies, strict=True)],
            "places": [p.position / len(p.ids) for p in prompts],
            **self._record(length, prompts, texts),
        }

    def _record(self, length: int, prompts: Sequence[RetrievalPrompt], replies: Sequence[str]) -> dict[str, Any]:
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

    def grid(self, parts: Sequence[Mapping[str, Any]]) -> RetrievalGrid:
        """Of what was kept of each length."""
        return RetrievalGrid(
            self.kind,
            list(self.lengths),
            list(self.depths),
            [
                [
                    sum(part["scores"][k : k + self.trials]) / self.trials
                    for k in range(0, len(part["scores"]), self.trials)
                ]
                for part in parts
            ],
            self.trials,
            places=[place for part in parts for place in part["places"]],
            scores=[score for part in parts for score in part["scores"]],
            wordings=[wording for part in parts for wording in part["wordings"]],
            prompt_hashes=[part["prompt_hash"] for part in parts],
            replies=[reply for part in parts for reply in part["replies"]],
            forced_scores=[score for part in parts for score in part["forced_scores"]],
            said=[sentence for part in parts for sentence in part["said"]],
        )


@dataclass
class _Together:
    """What is kept of one length, of several kinds whose prompts are asked in one call.

    Args:
        asked: the prompts of each kind.
        haystacks: of each kind.
        length: tokens of prompt and reply together.
        ask: answers questions.
        done: takes the tokens that are through by now.
        through: tokens that were before this length.
        answered: the kinds that have been asked.
    """

    asked: Mapping[Kind, _Prompts]
    haystacks: Mapping[Kind, Haystacks]
    length: int
    ask: Ask
    done: Callable[[int], None]
    through: int
    answered: dict[Kind, dict[str, Any]] = field(default_factory=dict)

    def part(self, kind: Kind) -> dict[str, Any]:
        """Of one kind; all that come after it are asked with it."""
        if kind not in self.answered:
            kinds = list(self.asked)
            self._answer(kinds[kinds.index(kind) :])
        return self.answered[kind]

    def _answer(self, kinds: Sequence[Kind]) -> None:
        prompts = {kind: self.asked[kind].of_length(self.length, self.haystacks[kind]) for kind in kinds}
        questions = [
            Question(p.ids, self.asked[kind].new_tokens, p.right_reply) for kind, of in prompts.items() for p in of
        ]
        # those of the kinds before were kept by an earlier run
        earlier = (len(self.asked) - len(kinds)) * len(questions) // len(kinds)
        replies, said = self.ask(questions, lambda n: self.done(self.through + self.length * (earlier + n)))
        for kind, of_kind in prompts.items():
            own, replies = replies[: len(of_kind)], replies[len(of_kind) :]
            self.answered[kind] = {**self.asked[kind].part(self.length, of_kind, own), "said": [said] if said else []}
