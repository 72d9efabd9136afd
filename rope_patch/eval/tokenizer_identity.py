"""Whether two tokenizers make the same tokens of a text and of a chat."""

from transformers import PreTrainedTokenizerBase

from .asking import TEMPLATE_OPTIONS

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
