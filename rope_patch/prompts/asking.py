"""How a model is asked: in raw text, or in the user's turn of its chat template."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

from transformers import PreTrainedTokenizerBase

from ..layout.special_tokens import SpecialTokens

ChatTemplate = Literal["auto", "on", "off"]
_MARK = "=text="
# a model that thinks before it answers would spend the few tokens of an answer on that; other templates ignore it
TEMPLATE_OPTIONS: dict[str, Any] = {"enable_thinking": False}


def uses_chat_template(tokenizer: PreTrainedTokenizerBase, choice: ChatTemplate) -> bool:
    """Whether a model is asked through its chat template: "auto" means if its tokenizer has one.

    Raises:
        ValueError: an unknown choice, or "on" for a tokenizer without a template.
    """
    if choice not in get_args(ChatTemplate):
        raise ValueError(f"chat_template must be one of {', '.join(get_args(ChatTemplate))}, got {choice!r}.")
    has_one = bool(getattr(tokenizer, "chat_template", None))
    if choice == "on" and not has_one:
        raise ValueError("chat_template='on' needs a tokenizer with a chat template, and this one has none: use 'off'.")
    return has_one and choice != "off"


def tokens_behind(tokenizer: PreTrainedTokenizerBase, text: str, before: str = ".") -> list[int]:
    """Token ids of a text that goes on another one.

    Tokenizers of Llama 2's kind put a space before all that they are given. Alone, " 7" would have two spaces, which no
    text has there.

    Args:
        tokenizer: of the model.
        text: what goes on.
        before: the text before it, or its end. Where its tokens are other ones together with `text`, that one is
            tokenized alone.
    """
    begun, both, alone = (tokenizer(t, add_special_tokens=False)["input_ids"] for t in (before, before + text, text))
    goes_on: list[int] = both[len(begun) :] if both[: len(begun)] == begun else alone
    return goes_on


@dataclass(frozen=True)
class Frame:
    """What stands around a text that a model is asked about.

    Args:
        begin: token ids before the text: those that begin any text, or the template's up to what a user writes.
        turn: what stands between the user's question and the model's answer; "" in raw text.
        tokens: of `begin` and `turn` together.
    """

    begin: tuple[int, ...]
    turn: str
    tokens: int

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, chat: bool) -> "Frame":
        """Of raw text, or of the tokenizer's chat template with one message by the user.

        Raises:
            ValueError: the template does not show the message as it was written, once.
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
