"""Tokens that end sentences, for view 'longrecipe'."""

import re
from typing import Any

_END = re.compile(r"""\s*[.?!…。？！]+["'”’)\]]*\s*|[ \t]*[\r\n]\s*""")


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
    special = set(tokenizer.all_special_ids)
    texts = tokenizer.batch_decode([[i] for i in range(len(tokenizer))])
    ends = [i for i, text in enumerate(texts) if i not in special and _END.fullmatch(text)]
    if not ends:
        raise ValueError(
            "view 'longrecipe' finds no token that ends a sentence in this tokenizer: pass token IDs, "
            "view_args={'target': ..., 'sentence_ends': [...]}."
        )
    return ends
