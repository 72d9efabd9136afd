"""Comparing tokenizers: a hash of one, and whether two give the same tokens for texts and for chats."""

import json

from transformers import PreTrainedTokenizerBase

from ...prompts.asking import TEMPLATE_OPTIONS
from .cache import data_hash

# state that calls leave in a tokenizer; it does not change the tokens of a text that is read whole
_STATE = ("truncation", "padding")
# a text on which normalizers, splits, merges and byte fallbacks all act
_PROBE = (
    " It's 12345.678 o'clock, THEY'LL say; naïve cafe\u0301  ﬁnd Ａ①\t\ttab\r\n\n\n    def f(x):\n        return {x!r}"
    "\n <|x|> https://a.b/c_d?e=%20 снег 東京タワー مرحبا हिन्दी 한국어 👩\u200d💻🇩🇪 \u200b\u00a0\u2028\x01 end  "
)
_CHATS = (
    [{"role": "user", "content": "Who was there?"}],
    [
        {"role": "user", "content": "Who was there?"},
        {"role": "assistant", "content": "Nobody."},
        {"role": "user", "content": "  And then?\n"},
    ],
)


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 over all that determines a tokenizer's tokens; earlier calls of the tokenizer do not change it."""
    special = [tokenizer.bos_token_id, tokenizer.eos_token_id]
    # slow tokenizers, in Python, have none
    core = getattr(tokenizer, "backend_tokenizer", None)
    if core is None:
        return data_hash(type(tokenizer).__name__, sorted(tokenizer.get_vocab().items()), special)
    return data_hash({k: v for k, v in json.loads(core.to_str()).items() if k not in _STATE}, special)


def reads_alike(first: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> bool:
    """Whether two tokenizers give the same tokens for a text.

    They do if their vocabularies are equal and a text with unusual characters gets the same tokens. A special token
    that only one of them has, such as one for padding, is ignored, because texts do not contain it.
    """
    mine, theirs = first.get_vocab(), other.get_vocab()
    harmless = (mine.keys() ^ theirs.keys()) & (_special(first) | _special(other))
    differing = {token for token, _ in mine.items() ^ theirs.items()}
    return differing <= harmless and first(_PROBE)["input_ids"] == other(_PROBE)["input_ids"]


def asks_alike(first: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> bool:
    """Whether the chat templates of two tokenizers give the same tokens for a conversation."""
    return all(_chat_tokens(first, chat) == _chat_tokens(other, chat) for chat in _CHATS)


def _special(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    return {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}


def _chat_tokens(tokenizer: PreTrainedTokenizerBase, chat: list[dict[str, str]]) -> list[int] | None:
    if not tokenizer.chat_template:
        return None
    shown = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, **TEMPLATE_OPTIONS)
    return list(tokenizer(str(shown), add_special_tokens=False)["input_ids"])
