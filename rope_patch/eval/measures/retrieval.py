"""Passkey and needle in a haystack: retrieval as written and teacher-forced, by length and depth."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
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
    haystacks_by_kind,
    shortest_prompt,
)
from .retrieval_grid import RetrievalGrid

if TYPE_CHECKING:
    from ..suite import EvalPlan


def passkey(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, lengths: Sequence[int], **options: Any
) -> RetrievalGrid:
    """Accuracy of repeating a five-digit key that is hidden in repeated filler sentences.

    Args:
        model: a causal LM.
        tokenizer: tokenizer of the model.
        lengths: tokens of prompt and reply together.
        **options: depths, trials, batch_size, seed, chat_template, wordings and progress, as in `retrieval`.

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
    """Accuracy of finding needles in a haystack of your own text, over lengths and depths.

    Args:
        model: a causal LM.
        tokenizer: tokenizer of the model.
        text: haystack; documents are joined.
        lengths: tokens of prompt and reply together, so nothing is ever truncated.
        kind: "single", "multikey", "multivalue", "multiquery" or "ordinal", as in `rope_patch.prompts.needles`.
        **options: n_needles and the options of `passkey`, as in `retrieval`.

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
    """The grids of `passkey` and `niah` for several kinds at once, so that text which prompts share is read once.

    "multikey" and "multiquery" ask about the same texts, prompt by prompt, and so do "multivalue" and "ordinal". The
    prompts of one kind have different texts, so their scores are independent. "several" asks about one text at all
    depths, so that a model reads one text for each trial, and its scores do not show how much texts differ.

    Args:
        model: a causal LM.
        tokenizer: tokenizer of the model.
        text: haystack of all kinds but "passkey"; documents are joined.
        lengths: tokens of prompt and reply together.
        kinds: kinds of needles, as in `rope_patch.prompts.needles`.
        depths: depths of one needle that is asked for; 0 is the start of the text and 1 its end. Others are drawn.
        trials: prompts for each length and depth.
        n_needles: number of hidden sentences, for all kinds but "passkey", "single" and "several".
        batch_size: maximum number of prompts in memory and answered at once; None means 8 GiB of keys and values.
        seed: seed of keys, values and places.
        chat_template: whether to use the tokenizer's chat template: "on", "off", or "auto", if there is one. Lengths
            include it.
        wordings: numbers of the wordings in `rope_patch.prompts.wordings`, which prompts use in turn.
        progress: whether to show a bar over tokens.
        remember: kind -> function that stores each of its lengths as soon as it is done.
        ask: function that answers questions in place of `ask_greedily`, and returns a sentence about them or "".

    Returns:
        Kind -> grid.

    Raises:
        ValueError: an unknown kind, depths outside [0, 1], or too little text.
    """
    grids = {
        kind: PromptGrid(kind, tokenizer, lengths, depths, trials, n_needles, seed, chat_template, tuple(wordings))
        for kind in kinds
    }
    haystacks = haystacks_by_kind(kinds, tokenizer, text, lengths)
    times = times_read(model) if progress and ask is None else 1
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id

    def ask_model(questions: Sequence[Question], done: Callable[[int], None]) -> tuple[list[Reply], str]:
        return ask_greedily(model, questions, pad_token=pad, batch_size=batch_size, done=done), ""

    parts: dict[Kind, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    tokens = [sum(grid.texts for grid in grids.values()) * length for length in lengths]

    def measure(length: int, before: int, done: Callable[[int], None]) -> None:
        """Measure all kinds at one length, after `before` tokens of shorter ones."""
        answered: dict[Kind, dict[str, Any]] = {}

        def part(kind: Kind) -> dict[str, Any]:
            if kind not in answered:
                # the kinds after this one are asked in the same call; those before it were stored by an earlier run
                j = kinds.index(kind)
                read = before + sum(grids[k].texts for k in kinds[:j]) * length
                missing = {k: grids[k] for k in kinds[j:]}
                answered.update(_answers(missing, haystacks, length, ask or ask_model, lambda n: done(read + n)))
            return answered[kind]

        for kind in kinds:
            parts[kind].append(remember(kind)({"length": length}, partial(part, kind)))

    with token_bar(model, sum(tokens), ", ".join(kinds), show=progress, times_read=times) as done:
        for k, length in enumerate(lengths):
            measure(length, sum(tokens[:k]), done)
            done(sum(tokens[: k + 1]))
    return {kind: grids[kind].grid(parts[kind]) for kind in kinds}


def _answers(
    grids: Mapping[Kind, PromptGrid],
    haystacks: Mapping[Kind, Haystacks],
    length: int,
    ask: Ask,
    done: Callable[[int], None],
) -> dict[Kind, dict[str, Any]]:
    """The stored results of one length, of several kinds whose questions are asked in one call."""
    prompts = {kind: grid.prompts(length, haystacks[kind]) for kind, grid in grids.items()}
    questions = [
        Question(prompt.ids, grids[kind].new_tokens, prompt.right_reply) for kind in prompts for prompt in prompts[kind]
    ]
    # a prompt that has been read still lacks its reply and the right answer, which move the bar token by token
    to_come = sum(q.max_new_tokens + len(q.answer) for q in questions) // len(questions)
    texts = sum(grid.texts for grid in grids.values())
    replies, note = ask(questions, lambda n: done((length - to_come) * n * texts // len(questions)))
    found = {}
    for kind, grid in grids.items():
        n = len(prompts[kind])
        found[kind] = {**grid.part(length, prompts[kind], replies[:n]), "said": [note] if note else []}
        replies = replies[n:]
    return found


_HELP: dict[Kind, str] = {
    "passkey": "retrieval of a five-digit number that is hidden in repeated filler sentences",
    "several": "retrieval of the passkeys of several people from one text, one at each depth. A model reads the text "
    "once for all questions, so it is quick, but other texts may differ by more than the questions show",
    "single": "needle in a haystack: retrieval of sentences hidden in your text. One; one of several; several at once; "
    "the first, second, ... of several. Also accuracy by the position of the answer",
}
_KINDS: dict[str, Kind] = {kind if kind in ("passkey", "several") else f"niah-{kind}": kind for kind in KINDS}


def kinds_of(plan: "EvalPlan") -> list[Kind]:
    """The kinds of prompts that a plan measures."""
    return [_KINDS[name] for name in plan.measures if name in _KINDS]


def _measured(job: Job) -> RetrievalGrid:
    """The grid of the running measure; all other missing grids are measured with it, because they share prompts."""
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


def _shortest(kind: Kind, plan: "EvalPlan", tokenizer: PreTrainedTokenizerBase) -> int:
    return shortest_prompt(kind, tokenizer, plan.chat_template)


def _check(plan: "EvalPlan", tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> None:
    # the kind with the longest prompts first: the length that its error names is enough for the others
    for kind in sorted(
        kinds_of(plan), key=lambda k: -shortest_prompt(k, tokenizer, plan.chat_template, depths=plan.depths)
    ):
        check_retrieval(kind, tokenizer, texts, plan.lengths, plan.chat_template, plan.depths)


RETRIEVAL = tuple(
    Measure(
        name=name,
        result=RetrievalGrid,
        run=_measured,
        flag="niah" if name.startswith("niah") else name,
        by_default=kind in ("passkey", "single", "multikey"),
        asks=True,
        settings=("trials", "depths", "seed", "chat_template", "backend"),
        parts=("lengths",),
        shortest=partial(_shortest, kind),
        check=_check,
        help=_HELP.get(kind, ""),
    )
    for name, kind in _KINDS.items()
)
