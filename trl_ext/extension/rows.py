"""The training rows of an extension."""

from itertools import product
from pathlib import Path
from typing import Any

import torch

from ..engines.device import free_memory
from ..rows.mix import SHORT_FACTS, make_rows
from ..rows.questions import question_rows
from ..rows.row import ASKING
from ..rows.row_file import contents, write_rows
from ..rows.sampling import sampled_chats, sampled_texts, until
from .choices import Choices
from .facts import ModelFacts
from .options import ExtendOptions
from .plan import own_tokens, row_counts

_TEXT_TOKENS = 1024


def check(facts: ModelFacts, choices: Choices, texts: list[str]) -> None:
    """Make a row of each kind with questions and of each length, to raise ValueError before any work if none fits."""
    value = choices.rows.value
    for kind, length in product([kind for kind in ASKING if kind in value["shares"]], row_counts(choices)):
        n = value["facts"] if length == value["length"] else min(value["facts"], SHORT_FACTS)  # as `make_rows` hides
        try:
            question_rows(facts.tokenizer, texts, 1, length=length, kind=kind, facts=n, chat=float(facts.is_chat))
        except ValueError as error:
            raise ValueError(
                f"rows of {length:,} tokens are too short for {kind}: {error} Give a larger --row-length, smaller "
                "--facts, or --short 0 to leave out the short rows."
            ) from error


def make(facts: ModelFacts, options: ExtendOptions, choices: Choices, texts: list[str], file: Path) -> dict[str, Any]:
    """Let the model write its own texts, mix rows and write them to `file`; returns what they contain."""
    value, tokens = choices.rows.value, own_tokens(choices)

    def written(kind: str) -> list[list[int]]:
        model: Any = facts.load(torch.float32 if options.device == "cpu" else facts.dtype)
        model = model.to(options.device).eval()
        if kind == "chats":
            own = sampled_chats(model, facts.tokenizer, seed=options.seed)
        else:
            # small test models may have a window shorter than the default length
            longest = min(_TEXT_TOKENS, facts.window // 2)
            own = sampled_texts(model, facts.tokenizer, max_tokens=longest, seed=options.seed)
        made = until(tokens[kind], own, f"{kind.replace('_', ' ')} of the model")
        del model, own
        free_memory()
        return made

    rows = make_rows(
        facts.tokenizer,
        value["n"],
        length=value["length"],
        texts=texts,
        chats=lambda: written("chats"),
        own_texts=lambda: written("own_texts"),
        shares=value["shares"],
        short=value["short"],
        facts=value["facts"],
        label_all=value["label_all"],
        seed=options.seed,
    )
    write_rows(file, rows)
    return {"contents": contents(rows), "rows": len(rows)}
