"""The text of a chat template around questions and answers."""

from dataclasses import dataclass
from typing import Any

from rope_patch.layout.special_tokens import SpecialTokens
from rope_patch.prompts.asking import TEMPLATE_OPTIONS, Frame


def require_template(tokenizer: Any, remedy: str) -> None:
    """Raise ValueError for a tokenizer without a chat template, as base models have; `remedy` says what to do."""
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(f"the tokenizer has no chat template, so this is a base model: {remedy}.")


@dataclass(frozen=True)
class ChatTurns:
    """The text before each question and each answer of a row.

    Args:
        begin: token ids before the text that the first question is about.
        before_question: text before each question; the first is behind the text that it is about.
        before_answer: text between each question and its answer.
    """

    begin: tuple[int, ...]
    before_question: tuple[str, ...]
    before_answer: tuple[str, ...]

    @classmethod
    def raw(cls, tokenizer: Any, n: int) -> "ChatTurns":
        """Lines of running text, for `n` questions."""
        return cls(SpecialTokens.of(tokenizer).begin, ("\n",) * n, (" ",) * n)

    @classmethod
    def chat(cls, tokenizer: Any, n: int) -> "ChatTurns":
        """Turns of one chat, for `n` questions, as the tokenizer's template writes them before its last answer.

        Raises:
            ValueError: the template does not show each message as it was written, once.
        """
        marks = [(f"=question{i}=", f"=answer{i}=") for i in range(n)]  # words that a template leaves alone
        messages: list[dict[str, str]] = []
        for question, answer in marks:
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        rest = str(
            tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True, **TEMPLATE_OPTIONS)
        )
        between = []  # before question 0, before answer 0, before question 1, ...
        for message in messages[:-1]:
            before, *behind = rest.split(message["content"])
            if len(behind) != 1:
                raise ValueError(
                    f"the chat template shows a message of a chat of {n} questions {len(behind)} times instead of "
                    "once, so a row cannot be built around it: use chat=0."
                )
            between.append(before)
            rest = behind[0]
        between.append(rest)
        begin = tokenizer(between[0], add_special_tokens=False)["input_ids"]
        # the first question stands behind its text in one message, in a line of its own
        return cls(tuple(begin), ("\n", *between[2::2]), tuple(between[1::2]))


@dataclass(frozen=True)
class SampledTurns:
    """The parts of a chat that the model writes itself, in token IDs.

    Args:
        begin: before the user's text.
        turn: from the end of the user's text to the beginning of the reply.
        end_of_user: the token that ends the user's text, the first of `turn`.
        ends_of_reply: tokens of which each ends a reply.
    """

    begin: tuple[int, ...]
    turn: tuple[int, ...]
    end_of_user: int
    ends_of_reply: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Any, ends: tuple[int, ...]) -> "SampledTurns":
        """Of a tokenizer's chat template; `ends` are the tokens that end any text of the model.

        Raises:
            ValueError: there is no template, or it ends a user's text without a special token.
        """
        require_template(tokenizer, "it writes no chats. Leave chats out, or take own_texts in their place")
        frame = Frame.of(tokenizer, True)
        turn = tuple(tokenizer(frame.turn, add_special_tokens=False)["input_ids"])
        if not turn or turn[0] not in _special(tokenizer):
            raise ValueError(
                f"the chat template ends a user's text with {frame.turn!r}, which does not begin with a special token, "
                "so the end of a sampled text is not known. Leave chats out, or take own_texts in their place."
            )
        shown = tokenizer.apply_chat_template(
            [{"role": "user", "content": "=question="}, {"role": "assistant", "content": "=answer="}], tokenize=False
        )
        # what the template puts right behind a reply ends one, too, though no config may name it
        closing = tokenizer(str(shown).split("=answer=")[-1], add_special_tokens=False)["input_ids"][:1]
        ends = tuple(dict.fromkeys([*ends, *(i for i in closing if i in _special(tokenizer))]))
        return cls(frame.begin, turn, turn[0], ends)


def _special(tokenizer: Any) -> set[int]:
    """Special tokens, also those that were added for a template."""
    added = (i for i, token in tokenizer.added_tokens_decoder.items() if token.special)
    return {*tokenizer.all_special_ids, *added}
