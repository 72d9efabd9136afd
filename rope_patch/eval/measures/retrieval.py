"""Passkey and needle-in-a-haystack: what a model writes and, beside it, teacher-forced, by length and depth."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from ...generation.generation import ask_greedily, times_read
from ...generation.reading import Question, Reply
from ...prompts.asking import ChatTemplate
from ...prompts.needles import KINDS, Kind
from ..results.cache import Remember, afresh
from ..results.progress import token_bar
from .base import Job, Measure
from .prompt_grid import (
    ALL_WORDINGS,
    DEPTHS,
    Ask,
    Haystacks,
    PromptGrid,
    check_retrieval,
    haystacks_of,
    needles_of,
    shortest_prompt,
)
from .retrieval_grid import RetrievalGrid

if TYPE_CHECKING:
    from ..suite import EvalPlan


def passkey(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, lengths: Sequence[int], **options: Any
) -> RetrievalGrid:
    """Repeat a five-digit key that stands somewhere in repeated filler sentences, as the model writes it.

    Args:
        model: a causal LM.
        tokenizer: of the model.
        lengths: tokens of prompt and reply together.
        **options: depths, trials, batch_size, seed, chat_template, wordings and progress, as `retrieval` takes them.

    Source: Mohtashami and Jaggi, Landmark Attention, 2023; used by PoSE, LongLoRA and PosAug.
    """
    return retrieval(model, tokenizer, (), lengths, kinds=("passkey",), **options)["passkey"]


def niah(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    text: str | Iterable[str],
    lengths: Sequence[int],
    *,
    kind: Kind = "single",
    **options: Any,
) -> RetrievalGrid:
    """Needle in a haystack over lengths and depths, in the user's own text, as the model writes its answers.

    Args:
        model: a causal LM.
        tokenizer: of the model.
        text: haystack; documents are joined.
        lengths: tokens of prompt and reply together, so nothing is ever truncated.
        kind: "single", "multikey", "multivalue", "multiquery" or "ordinal", as in `rope_patch.prompts.needles`.
        **options: n_needles and those of `passkey`, as `retrieval` takes them.

    Source: Kamradt's needle in a haystack; RULER, arXiv:2404.06654 (multi-key, -value, -query); RPSD,
    arXiv:2604.14339 (ordinal).
    """
    return retrieval(model, tokenizer, text, lengths, kinds=(kind,), **options)[kind]


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
        kinds: of needles, as in `rope_patch.prompts.needles`.
        depths: places of one needle asked for, 0 the start of the text and 1 its end; others are drawn.
        trials: prompts a cell.
        n_needles: sentences hidden, for all kinds but "passkey" and "single".
        batch_size: prompts held in memory and answered at once, at most; None means as many as fit.
        seed: of keys, values and places.
        chat_template: whether the model is asked through the tokenizer's chat template: "on", "off", or "auto", if
            there is one. Lengths include it.
        wordings: numbers of the phrasings in `rope_patch.prompts.wordings` that prompts take in turn.
        progress: whether to show a bar over tokens.
        remember: of a kind, what keeps each of its lengths as soon as it is done.
        ask: answers questions in place of `ask_greedily`, and says something about it in a sentence, or "".

    Returns:
        Kind -> grid.

    Raises:
        ValueError: an unknown kind, depths outside [0, 1], or too little text.
    """
    prompts = {
        kind: PromptGrid(
            kind, tokenizer, lengths, depths, trials, needles_of(kind, n_needles), seed, chat_template, tuple(wordings)
        )
        for kind in kinds
    }
    haystacks = haystacks_of(kinds, tokenizer, text, lengths)
    parts: dict[Kind, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    tokens = [len(kinds) * len(depths) * trials * length for length in lengths]
    times = times_read(model) if progress and ask is None else 1
    with token_bar(model, sum(tokens), ", ".join(kinds), show=progress, times_read=times) as done:
        for k, length in enumerate(lengths):
            before = sum(tokens[:k])
            together = _Together(
                prompts, haystacks, length, ask or _by_model(model, tokenizer, batch_size), done, before
            )
            for kind in kinds:
                parts[kind].append(remember(kind)({"length": length}, partial(together.part, kind)))
            done(before + tokens[k])
    return {kind: prompts[kind].grid(parts[kind]) for kind in kinds}


def _by_model(model: nn.Module, tokenizer: PreTrainedTokenizerBase, batch_size: int | None) -> Ask:
    """The model itself answers."""
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id

    def ask(questions: Sequence[Question], done: Callable[[int], None]) -> tuple[list[Reply], str]:
        return ask_greedily(model, questions, pad_token=pad, batch_size=batch_size, done=done), ""

    return ask


@dataclass
class _Together:
    """The results of one length, of several kinds whose prompts are asked in one call: what they share is read once.

    Args:
        grids: the prompts of each kind.
        haystacks: of each kind.
        length: tokens of prompt and reply together.
        ask: answers questions.
        done: takes the tokens that are through by now.
        through: tokens that were before this length.
        answered: the kinds that have been asked.
    """

    grids: Mapping[Kind, PromptGrid]
    haystacks: Mapping[Kind, Haystacks]
    length: int
    ask: Ask
    done: Callable[[int], None]
    through: int
    answered: dict[Kind, dict[str, Any]] = field(default_factory=dict)

    def part(self, kind: Kind) -> dict[str, Any]:
        """The results of one kind; all kinds that come after it are asked with it."""
        if kind not in self.answered:
            kinds = list(self.grids)
            self._answer(kinds[kinds.index(kind) :])
        return self.answered[kind]

    def _answer(self, kinds: Sequence[Kind]) -> None:
        prompts = {kind: self.grids[kind].of_length(self.length, self.haystacks[kind]) for kind in kinds}
        questions = [
            Question(p.ids, self.grids[kind].new_tokens, p.right_reply) for kind, of in prompts.items() for p in of
        ]
        # those of the kinds before were kept by an earlier run
        earlier = (len(self.grids) - len(kinds)) * len(questions) // len(kinds)
        # of a prompt that has been read, reply and right answer are still to come, and move the bar token by token
        to_come = sum(q.max_new_tokens + len(q.answer) for q in questions) // len(questions)

        def read(n: int) -> None:
            self.done(self.through + self.length * (earlier + n) - to_come * n)

        replies, said = self.ask(questions, read)
        for kind, of_kind in prompts.items():
            of_grid, replies = replies[: len(of_kind)], replies[len(of_kind) :]
            self.answered[kind] = {
                **self.grids[kind].part(self.length, of_kind, of_grid),
                "said": [said] if said else [],
            }


_HELP: dict[Kind, str] = {
    "passkey": "retrieval of a five-digit number that stands somewhere in repeated filler sentences",
    "single": "needle in a haystack: retrieval of sentences hidden in your text. One; one of several; several at once; "
    "the first, second, ... of several. Also accuracy by the place of the answer",
}
_KINDS: dict[str, Kind] = {kind if kind == "passkey" else f"niah-{kind}": kind for kind in KINDS}


def kinds_of(plan: "EvalPlan") -> list[Kind]:
    """The kinds of prompts that a plan asks."""
    return [_KINDS[name] for name in plan.measures if name in _KINDS]


def _measured(job: Job) -> RetrievalGrid:
    """The grid of the measure that runs; all others that are missing are measured with it, as they share prompts."""
    from .vllm_backend import vllm_answers

    plan, names = job.plan, {kind: name for name, kind in _KINDS.items()}
    kind = _KINDS[job.name]
    if kind not in job.shared:
        by_vllm = plan.backend == "vllm"
        with vllm_answers(job.model, job.checkpoint, max(plan.lengths, default=0)) if by_vllm else nullcontext() as ask:
            job.shared |= retrieval(
                job.model,
                job.tokenizer,
                job.texts,
                plan.lengths,
                kinds=[k for k in kinds_of(plan) if not job.is_kept(names[k])],
                depths=plan.depths,
                trials=plan.trials,
                batch_size=plan.batch_size,
                seed=plan.seed,
                chat_template=plan.chat_template,
                remember=lambda k: job.memory(names[k]),
                ask=ask,
            )
    grid: RetrievalGrid = job.shared[kind]
    return grid


def _check(plan: "EvalPlan", tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> None:
    # the kind with the longest prompts first: the length that its error names is enough for the others
    for kind in sorted(kinds_of(plan), key=lambda k: -shortest_prompt(k, tokenizer, plan.chat_template)):
        check_retrieval(kind, tokenizer, texts, plan.lengths, plan.chat_template)


RETRIEVAL = tuple(
    Measure(
        name=name,
        result=RetrievalGrid,
        run=_measured,
        flag="passkey" if kind == "passkey" else "niah",
        by_default=kind in ("passkey", "single", "multikey"),
        asks=True,
        settings=("trials", "depths", "seed", "chat_template", "backend"),
        parts=("lengths",),
        check=_check,
        help=_HELP.get(kind, ""),
    )
    for name, kind in _KINDS.items()
)
