"""Prompt formats: raw text, or a user's message in the chat template."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

from transformers import PreTrainedTokenizerBase

from ..layout.special_tokens import SpecialTokens

ChatTemplate = Literal["auto", "on", "off"]
_MARK = "=text="
# a reasoning model would spend the few tokens of an answer on thinking; other templates ignore this
TEMPLATE_OPTIONS: dict[str, Any] = {"enable_thinking": False}


def uses_chat_template(tokenizer: PreTrainedTokenizerBase, choice: ChatTemplate) -> bool:
    """Whether prompts use the tokenizer's chat template; "auto" uses it if there is one.

    Raises:
        ValueError: an unknown choice, or "on" for a tokenizer without a template.
    """
    if choice not in get_args(ChatTemplate):
        raise ValueError(f"chat_template must be one of {', '.join(get_args(ChatTemplate))}, got {choice!r}.")
    has_one = bool(getattr(tokenizer, "chat_template", None))
    if choice == "on" and not has_one:
        raise ValueError("chat_template='on' needs a tokenizer with a chat template, and this one has none: use 'off'.")
    return has_one and choice != "off"


def tokens_after(tokenizer: PreTrainedTokenizerBase, text: str, before: str = ".") -> list[int]:
    """Token IDs of a text that follows another one.

    Tokenizers such as Llama 2's put a space before every text. Alone, " 7" would get two spaces, which it has in no
    longer text.

    Args:
        tokenizer: of the model.
        text: the text.
        before: the text before it, or its end. If `text` changes the tokens of `before`, it is tokenized alone.
    """
    first, both, alone = (tokenizer(t, add_special_tokens=False)["input_ids"] for t in (before, before + text, text))
    following: list[int] = both[len(first) :] if both[: len(first)] == first else alone
    return following


@dataclass(frozen=True)
class Frame:
    """What surrounds a text and its question in a prompt.

    Args:
        begin: token IDs before the text: those that begin any text, or the template's before the user's message.
        turn: text between the user's question and the model's answer; "" in raw text.
        tokens: number of tokens of `begin` and `turn`.
    """

    begin: tuple[int, ...]
    turn: str
    tokens: int

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, chat: bool) -> "Frame":
        """The frame of raw text, or of one user message in the tokenizer's chat template.

        Raises:
            ValueError: the template does not show the message exactly once, unchanged.
        """
        if not chat:
            begin = SpecialTokens.of(tokenizer).begin
            return cls(begin, "", len(begin))
        message = [{"role": "user", "content": _MARK}]
        text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True, **TEMPLATE_OPTIONS)
        before, *rest = str(text).split(_MARK)
        if len(rest) != 1:
            raise ValueError(
                f"the chat template shows a user's message {len(rest)} times instead of once, so a prompt cannot be "
                "built around it: use chat_template='off'."
            )
        begin = tuple(tokenizer(before, add_special_tokens=False)["input_ids"])
        turn = tokenizer(rest[0], add_special_tokens=False)["input_ids"]
        return cls(begin, rest[0], len(begin) + len(turn))
