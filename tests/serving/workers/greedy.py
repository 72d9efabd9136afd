"""The likeliest tokens behind a text that a program has read, for workers that read a token at a time."""

from collections.abc import Callable, Sequence

import numpy as np

Read = Callable[[Sequence[int], int], np.ndarray]
"""Tokens, place of the first -> logits [vocabulary] behind the last; what was read from that place on is dropped."""


def written(read: Read, text: np.ndarray, questions: list[list[int]], tokens: int) -> list[list[int]]:
    """Of each question, as many likeliest tokens one after the other, behind `text`, which was read before."""
    return [_reply(read, len(text), question, tokens) for question in questions]


def _reply(read: Read, place: int, unread: list[int], tokens: int) -> list[int]:
    reply: list[int] = []
    while len(reply) < tokens:
        reply.append(int(read(unread, place).argmax()))
        place += len(unread)
        unread = reply[-1:]
    return reply
