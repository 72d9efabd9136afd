"""Where the parts of a text end, for views 'longrecipe' and 'skip'."""

import re
from collections.abc import Sequence
from typing import Any

import torch

from ..base.draws import DrawKey
from ..layout.documents import Documents

_SENTENCE = re.compile(r"""\s*[.?!…。？！]+["'”’)\]]*\s*|[ \t]*[\r\n]\s*""")
_PARAGRAPH = re.compile(r"\n\s*\n\s*$")

BORDERS = ("sentence", "paragraph", "document")
"""Names of what `border_tokens` finds in a tokenizer."""


def sentence_ends(tokenizer: Any) -> list[int]:
    """IDs of the tokens that are a closing mark, with or without quotes and brackets after it, or only a line break.

    Tokens with a mark inside, such as "3.1", do not count. LongRecipe's code lists five tokens of Llama 3: ".", "?",
    "!", a line break, and a full stop with a line break. They are included.

    Args:
        tokenizer: of Transformers.

    Raises:
        ValueError: the tokenizer has no such token.

    Source: LongRecipe, arXiv:2409.00509, for the use; the rule is ours.
    """
    ends = [i for i, text in _texts(tokenizer).items() if _SENTENCE.fullmatch(text)]
    if not ends:
        raise _missing("sentence")
    return ends


def border_tokens(tokenizer: Any, name: str) -> list[list[int]]:
    """Sequences of token IDs after which a part of a text ends.

    Args:
        tokenizer: of Transformers.
        name: "sentence", each token of `sentence_ends`; "paragraph", a token that ends with a blank line, or two
            tokens for a line break; "document", the end-of-sequence token, which in chat models ends a turn.

    Raises:
        ValueError: the tokenizer has no such token.
    """
    if name == "sentence":
        return [[i] for i in sentence_ends(tokenizer)]
    if name == "document":
        found = [] if tokenizer.eos_token_id is None else [[tokenizer.eos_token_id]]
    else:
        texts = _texts(tokenizer)
        found = [[i] for i, text in texts.items() if _PARAGRAPH.search(text)]
        found += [[i, i] for i, text in texts.items() if text == "\n"]
    if not found:
        raise _missing(name)
    return found


def _texts(tokenizer: Any) -> dict[int, str]:
    special = set(tokenizer.all_special_ids)
    texts = tokenizer.batch_decode([[i] for i in range(len(tokenizer))])
    return {i: text for i, text in enumerate(texts) if i not in special}


def _missing(name: str) -> ValueError:
    return ValueError(
        f"this tokenizer has no token that ends a {name}: give token IDs, sentence_ends=[...] of view 'longrecipe' or "
        "split=[[...], ...] of view 'skip'."
    )


def checked_borders(name: str, borders: Sequence[object]) -> tuple[tuple[int, ...], ...]:
    """Borders as tuples; raises ValueError unless they are one or more lists of one or more token IDs."""
    lists = [tuple(ids) if isinstance(ids, Sequence) else () for ids in borders]
    if not lists or not all(ids and all(type(i) is int for i in ids) for ids in lists):
        raise ValueError(
            f"{name} must be one of {BORDERS}, or lists of the token IDs after which it may fall, such as [[13], [198, "
            f"198]], got {borders!r}."
        )
    return tuple(sorted(set(lists)))


def drawn_border(
    ids: torch.Tensor, t: torch.Tensor, documents: Documents, key: DrawKey, borders: Sequence[Sequence[int]]
) -> torch.Tensor:
    """A token of each document that follows one of `borders`, all of them equally likely; its length without any.

    Args:
        ids: token IDs, [batch, seq_len].
        t: index of each token in its document, [1 or batch, seq_len], -1 on padding.
        documents: of the batch.
        key: source of randomness, in the shape of documents.
        borders: sequences of token IDs, as of `border_tokens`.

    Returns:
        int64 in the shape of documents.
    """
    t = t.expand(ids.shape)
    follows = torch.zeros_like(ids, dtype=torch.bool)
    for size in {len(border) for border in borders}:
        if size < ids.shape[1]:
            windows = ids.unfold(1, size, 1)[:, :-1]  # the `size` tokens before each token from `size` on
            known = torch.tensor([border for border in borders if len(border) == size], device=ids.device)
            found = torch.isin(windows[..., 0], known[:, 0]) if size == 1 else _any_of(windows, known)
            follows[:, size:] |= found & (t[:, size:] >= size)
    picked = key.pick(follows, t)
    return torch.where(picked < 0, documents.length, picked)


def _any_of(windows: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    found = torch.zeros_like(windows[..., 0], dtype=torch.bool)
    for border in known:
        found |= (windows == border).all(-1)
    return found
