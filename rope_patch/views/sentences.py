"""Where sentences end, for `view="longrecipe"`."""

import re
from typing import Any

_END = re.compile(r"""\s*[.?!…。？！]+["'”’)\]]*\s*|[ \t]*[\r\n]\s*""")


def sentence_ends(tokenizer: Any) -> list[int]:
    """Ids of the tokens that are a closing mark, maybe with quotes and brackets behind it, or a line break alone.

    Words that hold a mark, such as "3.1", are none. LongRecipe's code names five of Llama 3: ".", "?", "!", a line
    break and a full stop before one; those are among them.

    Args:
        tokenizer: of Transformers.

    Raises:
        ValueError: the tokenizer has none.

    Source: LongRecipe, arXiv:2409.00509, for the use; the rule is ours.
    """
    special = set(tokenizer.all_special_ids)
    texts = tokenizer.batch_decode([[i] for i in range(len(tokenizer))])
    ends = [i for i, text in enumerate(texts) if i not in special and _END.fullmatch(text)]
    if not ends:
        raise ValueError(
            "view 'longrecipe' finds no token that ends sentences in this tokenizer: name them, "
            "view_args={'target': ..., 'sentence_ends': [...]}."
        )
    return ends
