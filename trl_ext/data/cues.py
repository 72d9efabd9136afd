"""Append a cue to each document, for view "endprompt"."""

import json
import re
from collections.abc import Sequence
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from rope_patch.base.draws import philox4x32
from rope_patch.base.registry import unknown
from rope_patch.layout.special_tokens import SpecialTokens
from rope_patch.views import VIEWS

from .long_documents import cut_ids

CUES = {
    "sentence": "This is the end of text, please pay attention here",
    "word": "End.",
}
"""The paper's cues that are texts, EP_1 and EP_3. "end-of-turn" is its EP_2, `<|eot_id|>` of Llama 3.

Source: EndPrompt, arXiv:2605.14589, Appendix B.1.
"""

_NAMES = (*CUES, "end-of-turn", "none")
_A_NAME = re.compile(r"[a-z]+(-[a-z]+)*")
_ENDS_OF_TURN = ("<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<|eot|>", "<|end|>")
_MASKS = ("completion_mask", "assistant_masks")
_COMES_FIRST = {"messages", "prompt", "input_ids"}  # TRL reads these rather than a text

CueTokens = int | list[list[int]]
"""`cue_tokens` of a view: the number of tokens of one cue, or the token IDs of each of a set."""


def views_with_cues() -> str:
    """The registered views that use a cue, for errors and help."""
    return " or ".join(f"view={name!r}" for name, view in VIEWS.items() if view.cue_option is not None)


def require_cue(cue: object) -> None:
    """Raise ValueError unless `cue` is a known name, or a text that cannot be mistaken for a name."""
    if not isinstance(cue, str):
        raise ValueError(f"cue must be a name or a text, or a list of them, got {cue!r}.")
    if _A_NAME.fullmatch(cue) and cue not in _NAMES:
        raise ValueError(
            f"{unknown('cue', cue, _NAMES)} A text of your own has a space, a capital, a digit or a mark, such as "
            "'The end.'"
        )


def cue_ids(tokenizer: PreTrainedTokenizerBase, cue: str) -> list[int]:
    """Token ids of a cue.

    Args:
        tokenizer: of the model.
        cue: "sentence" or "word", see `CUES`; "end-of-turn", the token by which the tokenizer's chat template ends an
            assistant's turn or, without a template, one of the usual names of it or the end-of-sequence token; "none";
            or another text, which must be more than one word of lower-case letters and hyphens.

    Raises:
        ValueError: a word that is no name, "end-of-turn" of a tokenizer that has no such token, or a text without
            tokens.
    """
    require_cue(cue)
    if cue == "none":
        return []
    if cue == "end-of-turn":
        end = end_of_turn(tokenizer)
        if end is None:
            raise ValueError("cue 'end-of-turn' needs a tokenizer with an end-of-turn or end-of-text token.")
        return [end]
    ids: list[int] = tokenizer(CUES.get(cue, cue), add_special_tokens=False)["input_ids"]
    if not ids:
        raise ValueError(f"cue must have at least one token, got {cue!r}; cue='none' leaves it out.")
    return ids


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The first special token that the chat template puts after an assistant's reply, else one with a usual name.

    Returns:
        Its id; None if the tokenizer has neither such a token nor an end-of-sequence token.
    """
    added: dict[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    special = {*tokenizer.all_special_ids, *(i for i, token in added.items() if token.special)}
    special -= {tokenizer.unk_token_id}  # a word of the template's that is not in the vocabulary
    if getattr(tokenizer, "chat_template", None):
        answer = "It is Aurelius."
        turns = [{"role": "user", "content": "What is the name?"}, {"role": "assistant", "content": answer}]
        _, reply, behind = str(tokenizer.apply_chat_template(turns, tokenize=False)).rpartition(answer)
        # `reply` is empty where the template changes the text of an answer
        ids: list[int] = tokenizer(behind, add_special_tokens=False)["input_ids"] if reply and behind else []
        end = next((token for token in ids if token in special), None)
        if end is not None:
            return end
    vocabulary = tokenizer.get_vocab()
    named = next((vocabulary[name] for name in _ENDS_OF_TURN if name in vocabulary), tokenizer.eos_token_id)
    return named if isinstance(named, int) else None


def append_cue(
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    *,
    cue: str | Sequence[str] = "sentence",
    max_length: int,
    seed: int = 0,
    text_field: str = "text",
) -> tuple[Dataset, CueTokens]:
    """A tokenized dataset whose documents all end with the cue, or with one of a set, and the view's `cue_tokens`.

    Documents are tokenized as TRL does, which ends a text or a plain completion with the end-of-sequence token; the cue
    comes behind it. So rows of cue "none" are those of plain fine-tuning, and completions train a stop. A text is cut
    into pieces that leave room for the cue, so that all of it is kept: each begins with the tokens that the tokenizer
    puts before a text, the last one alone has the end-of-sequence token, and all have the cue. `prompt` and
    `completion`, plain or as messages, `messages` and `input_ids` stay whole. What holds special tokens alone, as an
    empty text does, gets no cue, which would be all that it teaches: the trainer leaves it out and says so. Columns of
    the result: `input_ids`, and `completion_mask` where there are completions, the cue being part of them.

    Args:
        dataset: of one of these formats.
        tokenizer: of the model.
        cue: as in `cue_ids`; of several, each document gets one, drawn by `seed` and its number in the result.
        max_length: tokens of a document and its cue, at most; of several cues, the longest.
        seed: of the draw.
        text_field: the column of texts.

    Returns:
        The dataset, and `cue_tokens` of the view: the cue's number of tokens, or the token ids of each of a set.

    Raises:
        ValueError: an unknown format, documents that are too long and may not be cut, or a set with a cue twice or
            without tokens.

    Source: EndPrompt, its data and Eq. 10.
    """
    cues = [cue_ids(tokenizer, text) for text in ([cue] if isinstance(cue, str) else cue)]
    if not isinstance(cue, str) and (not cues or not all(cues) or any(c in cues[:i] for i, c in enumerate(cues))):
        raise ValueError(f"a set of cues must hold different ones of at least one token each, got {list(cue)}.")
    longest = max(len(ids) for ids in cues)
    room = max_length - longest
    if room < 1:
        raise ValueError(f"max_length must be above the {longest} tokens of the cue, got {max_length}.")

    special = frozenset(tokenizer.all_special_ids)

    def ended(row: dict[str, Any], number: int) -> dict[str, Any]:
        is_empty = special.issuperset(row["input_ids"])  # or of special tokens alone
        ids = []
        if not is_empty:
            # U{0 .. n - 1} by the generator of the views, under a stream of its own
            key = (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF)
            word, *_ = philox4x32((0, number & 0xFFFFFFFF, 0x0C0E, 0), key)
            ids = cues[int(word) * len(cues) >> 32]  # 32 random bits times n, divided by 2^32
        labels = {"labels": row["labels"] + ids} if "labels" in row else {}
        # the cue counts in the loss
        masks = {name: [int(entry) for entry in row[name]] + [1] * len(ids) for name in _MASKS if name in row}
        return {"input_ids": row["input_ids"] + ids, **labels, **masks}

    dataset = dataset.with_format(None)  # plain lists, which `+` joins; arrays it would add
    tokens: CueTokens = longest if isinstance(cue, str) else cues
    columns = dataset.column_names
    if text_field in columns and not _COMES_FIRST & set(columns):
        pieces = dataset.map(
            lambda batch: {"input_ids": _cut(tokenizer, batch[text_field], room)}, batched=True, remove_columns=columns
        )
        return pieces.map(ended, with_indices=True), tokens
    if not ({"prompt", "completion"} <= set(columns) or "messages" in columns or "input_ids" in columns):
        raise ValueError(
            f"dataset must have {text_field}, prompt and completion, messages, or input_ids, got {', '.join(columns)}. "
            "Set text_field if the text has another name."
        )
    if "seq_lengths" in columns:
        raise ValueError(
            "dataset has packed rows (seq_lengths), and a cue ends each document: give one document a row, and "
            "packing=True packs them."
        )
    whole = dataset.map(lambda row: _whole(tokenizer, row), remove_columns=columns)
    lengths = [len(row) for row in whole["input_ids"]]
    too_long = sum(n > room for n in lengths)
    if too_long:
        raise ValueError(
            f"{too_long} of {len(lengths)} documents have more than {room} tokens, {max_length} less the cue; the "
            f"longest has {max(lengths)}. Raise max_length, or shorten them."
        )
    return whole.map(ended, with_indices=True), tokens


def _cut(tokenizer: PreTrainedTokenizerBase, texts: list[str], room: int) -> list[list[int]]:
    """Token IDs of texts, in pieces of at most `room` tokens."""
    encoded = tokenizer([_stopped(tokenizer, text) for text in texts], verbose=False)["input_ids"]
    begin: tuple[int, ...] | None = None
    rows = []
    for ids in encoded:
        if len(ids) > room and begin is None:
            # asked where a text is cut only: an error for tokenizers that hide them
            begin = SpecialTokens.of(tokenizer).begin
        rows += cut_ids(ids, room, begin or ())
    return rows


def _stopped(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """The text as TRL reads it, with the end-of-sequence token behind it."""
    eos = tokenizer.eos_token
    return text if not isinstance(eos, str) or text.endswith(eos) else text + eos


def _whole(tokenizer: PreTrainedTokenizerBase, row: dict[str, Any]) -> dict[str, Any]:
    """Token ids of a row, and which of them are a completion's."""
    if "input_ids" in row:
        return {name: row[name] for name in ("input_ids", "labels", *_MASKS) if name in row}
    chat: dict[str, Any] = dict(row.get("chat_template_kwargs") or {})
    if row.get("tools"):
        chat["tools"] = json.loads(row["tools"]) if isinstance(row["tools"], str) else row["tools"]
    if "messages" in row:
        return {"input_ids": _chat(tokenizer, row["messages"], chat)}
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str):
        before = tokenizer(prompt)["input_ids"]  # with special tokens, as TRL does
        both = tokenizer(prompt + _stopped(tokenizer, completion))["input_ids"]
    else:
        before = _chat(tokenizer, prompt, {**chat, "add_generation_prompt": True})
        both = _chat(tokenizer, [*prompt, *completion], chat)
    # as TRL: where both begin to differ, which is before the prompt's end if tokens or templates run across it
    n_prompt = next((i for i, pair in enumerate(zip(before, both, strict=False)) if pair[0] != pair[1]), len(before))
    return {"input_ids": both, "completion_mask": [0] * n_prompt + [1] * (len(both) - n_prompt)}


def _chat(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], options: dict[str, Any]) -> list[int]:
    encoded: Any = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **options)
    ids: list[int] = encoded["input_ids"]
    return ids
