"""What tells tokenizers apart: a hash of one, and whether two make the same of a text and of a chat."""

import json

from transformers import PreTrainedTokenizerBase

from ...prompts.asking import TEMPLATE_OPTIONS
from .cache import data_hash

# what calls of a tokenizer leave behind in it; neither changes the tokens of a text that is read whole
_STATE = ("truncation", "padding")
# normalizers, splits, merges and fallbacks for bytes all have something to do here
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
    """SHA-256 over what a tokenizer's tokens depend on, the same in every run and whatever it was called with."""
    special = [tokenizer.bos_token_id, tokenizer.eos_token_id]
    core = getattr(tokenizer, "backend_tokenizer", None)
    if core is None:
        return data_hash(type(tokenizer).__name__, sorted(tokenizer.get_vocab().items()), special)
    return data_hash({k: v for k, v in json.loads(core.to_str()).items() if k not in _STATE}, special)


def reads_alike(first: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> bool:
    """Whether two tokenizers make the same tokens of a text.

    Their vocabularies are the same, and so are the tokens of a text with odd characters. A special token that only one
    of them has, as one for padding, makes no difference: texts do not hold it.
    """
    mine, theirs = first.get_vocab(), other.get_vocab()
    harmless = (mine.keys() ^ theirs.keys()) & (_special(first) | _special(other))
    differing = {token for token, _ in mine.items() ^ theirs.items()}
    return differing <= harmless and first(_PROBE)["input_ids"] == other(_PROBE)["input_ids"]


def asks_alike(first: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> bool:
    """Whether the chat templates of two tokenizers make the same tokens of a conversation."""
    return all(_chat_tokens(first, chat) == _chat_tokens(other, chat) for chat in _CHATS)


def _special(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    return {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}


def _chat_tokens(tokenizer: PreTrainedTokenizerBase, chat: list[dict[str, str]]) -> list[int] | None:
    """None without a template."""
    if not tokenizer.chat_template:
        return None
    shown = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, **TEMPLATE_OPTIONS)
    return list(tokenizer(str(shown), add_special_tokens=False)["input_ids"])
