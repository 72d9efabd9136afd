"""Pieces of texts at random places, without tokenizing whole texts."""

import random
from bisect import bisect
from collections.abc import Iterable
from itertools import accumulate
from typing import Any

_CHARACTERS_PER_TOKEN = 5  # more than most texts have, so that one try is usually enough
_LONGEST_WORD = 40  # characters


class Pieces:
    """Draws pieces of a given number of tokens from texts, uniformly over places.

    Args:
        tokenizer: of the model.
        texts: documents; blank ones are left out.

    Raises:
        ValueError: all texts are blank.
    """

    def __init__(self, tokenizer: Any, texts: Iterable[str]) -> None:
        self.tokenizer = tokenizer
        self.texts = [text for text in texts if text.strip()]
        if not self.texts:
            raise ValueError("texts must hold at least one document that is not blank, got none.")
        self._ends = list(accumulate(map(len, self.texts)))  # character behind each text, of all joined

    def draw(self, n_tokens: int, rng: random.Random) -> list[int]:
        """Token IDs of a piece of `n_tokens` tokens without special tokens, of one document if it is long enough.

        Documents of which one is too short are joined by a blank line, each at most once in a piece.

        Raises:
            ValueError: all documents together are too short.
        """
        ids: list[int] = []
        used: set[int] = set()
        while len(ids) < n_tokens:
            if len(used) == len(self.texts):
                raise ValueError(
                    f"the texts hold {len(ids)} tokens together, and a row needs {n_tokens} of them: give more or "
                    "longer texts, or make shorter rows."
                )
            number = bisect(self._ends, rng.randrange(self._ends[-1]))  # a long document is drawn more often
            if number in used:  # all of it is in the piece
                continue
            used.add(number)
            if ids:
                ids += self._ids("\n\n")
            missing = n_tokens - len(ids)
            # a blank line may have filled the piece
            ids += self._piece(self.texts[number], missing, rng) if missing > 0 else []
        return ids[:n_tokens]

    def _piece(self, text: str, n_tokens: int, rng: random.Random) -> list[int]:
        """`n_tokens` tokens from a random place, or the last ones, or the whole text if it is shorter."""
        start = _word_start(text, rng.randrange(len(text)))
        size = _CHARACTERS_PER_TOKEN * n_tokens
        while start + size < len(text):
            ids = self._ids(text[start : start + size])
            if len(ids) > n_tokens:  # one more than needed: the last one may be half a word
                return ids[:n_tokens]
            size *= 2
        ids = self._ids(text[start:])
        if len(ids) >= n_tokens:
            return ids[:n_tokens]
        while start > 0 and len(ids) < n_tokens:  # too near the end of the document: go back
            start = _word_start(text, max(len(text) - size, 0))
            size *= 2
            ids = self._ids(text[start:])
        return ids[-n_tokens:]

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _word_start(text: str, place: int) -> int:
    """The start of the word at `place`: pieces that begin within a word would have unusual tokens.

    `place` itself where no word begins soon before it, as in languages without spaces.
    """
    for start in range(place, max(place - _LONGEST_WORD, 0), -1):
        if text[start - 1].isspace():
            return start
    return 0 if place < _LONGEST_WORD else place
