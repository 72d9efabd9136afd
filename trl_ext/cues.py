"""Cues behind documents, for `view="endprompt"`: all of their tokens behind each, and nothing cut in silence."""

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from datasets import Dataset
from torch import nn
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rope_patch.draws import philox4x32

if TYPE_CHECKING:
    from .config import RopeSFTConfig

_MASK = 0xFFFFFFFF
CUES = {
    "sentence": " This is where the text comes to its end.",
    "word": " Finis",
}
"""Cues of our own, in the kinds of the paper: a short sentence that announces the end, and one word. "end-of-turn", its
third, is the token by which the tokenizer ends a turn or, without one, a text."""


def cue_ids(tokenizer: PreTrainedTokenizerBase, cue: str) -> list[int]:
    """Token ids of a cue.

    Args:
        tokenizer: of the model.
        cue: "sentence", "word", "end-of-turn", "none", or a text of one's own.

    Raises:
        ValueError: "end-of-turn" of a tokenizer that has no such token, or a text without tokens.
    """
    if cue == "none":
        return []
    if cue == "end-of-turn":
        found = getattr(tokenizer, "eot_token_id", None) or tokenizer.eos_token_id
        if not isinstance(found, int):
            raise ValueError("cue 'end-of-turn' needs a tokenizer with an end-of-turn or end-of-text token.")
        return [found]
    ids: list[int] = tokenizer(CUES.get(cue, cue), add_special_tokens=False)["input_ids"]
    if not ids:
        raise ValueError(f"cue must have at least one token, got {cue!r}; cue='none' leaves it out.")
    return ids


CueTokens = int | list[list[int]]


def append_cue(
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    *,
    cue: str | Sequence[str] = "sentence",
    max_length: int,
    seed: int = 0,
) -> tuple[Dataset, CueTokens]:
    """A tokenized dataset whose documents all end with the cue, or with one of a set, and the view's `cue_tokens`.

    `text` is cut into pieces that leave room for the cue, so that all of it is kept; `prompt` and `completion`, plain
    or as messages, and `messages` are tokenized as TRL does and stay whole; `input_ids` likewise. Columns of the
    result: `input_ids`, and `completion_mask` where there are completions, the cue being part of them.

    Args:
        dataset: of one of these formats.
        tokenizer: of the model.
        cue: as in `cue_ids`; of several, each document gets one, drawn by `seed` and its number in the result.
        max_length: tokens of a document and its cue, at most; of several cues, the longest.
        seed: of the draw.

    Returns:
        The dataset, and `cue_tokens` of the view: the cue's number of tokens, or the token ids of each of a set.

    Raises:
        ValueError: an unknown format, documents that are too long and may not be cut, or a set with a cue twice or
            without tokens.

    Source: EndPrompt, its data and Eq. 10.
    """
    cues = [cue_ids(tokenizer, one) for one in ([cue] if isinstance(cue, str) else cue)]
    if not isinstance(cue, str) and (not cues or not all(cues) or any(c in cues[:i] for i, c in enumerate(cues))):
        raise ValueError(f"a set of cues must hold different ones of at least one token each, got {list(cue)}.")
    longest = max(len(ids) for ids in cues)
    room = max_length - longest
    if room < 1:
        raise ValueError(f"max_length must be above the {longest} tokens of the cue, got {max_length}.")

    def ended(row: dict[str, Any], number: int) -> dict[str, Any]:
        ids = cues[drawn(len(cues), number, seed)]
        masks = {"completion_mask": row["completion_mask"] + [1] * len(ids)} if "completion_mask" in row else {}
        return {"input_ids": row["input_ids"] + ids, **masks}

    tokens: CueTokens = longest if isinstance(cue, str) else cues
    columns = dataset.column_names
    if "text" in columns:
        pieces = dataset.map(
            lambda batch: {"input_ids": _cut(tokenizer, batch["text"], room)}, batched=True, remove_columns=columns
        )
        return pieces.map(ended, with_indices=True), tokens
    if not ({"prompt", "completion"} <= set(columns) or "messages" in columns or "input_ids" in columns):
        raise ValueError(
            f"dataset must have text, prompt and completion, messages, or input_ids, got {', '.join(columns)}."
        )
    whole = dataset.map(lambda row: _whole(tokenizer, row), remove_columns=columns)
    lengths = [len(row) for row in whole["input_ids"]]
    too_long = sum(n > room for n in lengths)
    if too_long:
        raise ValueError(
            f"{too_long} of {len(lengths)} documents have more than {room} tokens, {max_length} less the cue; the "
            f"longest has {max(lengths)}. Raise max_length, or shorten them: they would be cut."
        )
    return whole.map(ended, with_indices=True), tokens


def drawn(n: int, number: int, seed: int) -> int:
    """U{0 .. n - 1} for document `number`, by the generator of the views under a stream of its own."""
    stream = 0x0C0E
    word, *_ = philox4x32((0, number & _MASK, stream, 0), (seed & _MASK, (seed >> 32) & _MASK))
    return int(word) * n >> 32


def with_cue(
    model: str | nn.Module, args: "RopeSFTConfig", kwargs: dict[str, Any]
) -> tuple["RopeSFTConfig", dict[str, Any]]:
    """A trainer's arguments with `args.cue` behind the documents of its training set; those given stay as they are.

    Raises:
        ValueError: a training set that is no `datasets.Dataset`, or what `append_cue` refuses.
    """
    dataset, tokenizer = kwargs.get("train_dataset"), kwargs.get("processing_class")
    if not isinstance(dataset, Dataset):
        raise ValueError(f"cue needs a datasets.Dataset as train_dataset, got {type(dataset).__name__}.")
    if tokenizer is None:
        name: Any = model if isinstance(model, str) else model.config._name_or_path  # type: ignore[union-attr]
        tokenizer = AutoTokenizer.from_pretrained(name)
    assert args.cue is not None and args.max_length is not None
    seed = args.seed if args.view_seed is None else args.view_seed
    dataset, tokens = append_cue(dataset, tokenizer, cue=args.cue, max_length=args.max_length, seed=seed)
    args = copy.copy(args)
    args.view_args = {**args._options("view_args"), "cue_tokens": tokens}
    if "completion_mask" in dataset.column_names and args.completion_only_loss is None:
        args.completion_only_loss = True  # as TRL decides for prompts and completions
    return args, {**kwargs, "train_dataset": dataset}


def _cut(tokenizer: PreTrainedTokenizerBase, texts: list[str], room: int) -> list[list[int]]:
    encoded = tokenizer(texts, verbose=False)["input_ids"]
    return [ids[first : first + room] for ids in encoded for first in range(0, len(ids), room)]


def _whole(tokenizer: PreTrainedTokenizerBase, row: dict[str, Any]) -> dict[str, Any]:
    """Token ids of a row, and which of them are a completion's."""
    if "input_ids" in row:
        return {name: row[name] for name in ("input_ids", "completion_mask") if name in row}
    if "messages" in row:
        return {"input_ids": _chat(tokenizer, row["messages"], reply=False)}
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str):
        before = tokenizer(prompt)["input_ids"]
        both = tokenizer(prompt + completion)["input_ids"]
    else:
        before = _chat(tokenizer, prompt, reply=True)
        both = _chat(tokenizer, [*prompt, *completion], reply=False)
    return {"input_ids": both, "completion_mask": [0] * len(before) + [1] * (len(both) - len(before))}


def _chat(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], *, reply: bool) -> list[int]:
    encoded: Any = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=reply, return_dict=True)
    ids: list[int] = encoded["input_ids"]
    return ids
