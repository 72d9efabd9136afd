"""The training rows of an extension."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from ..engines.device import free_memory
from ..rows.mix import make_rows
from ..rows.questions import question_rows
from ..rows.row_file import contents, write_rows
from ..rows.sampling import sampled_chats, sampled_texts
from .choices import Choices
from .facts import ModelFacts
from .options import ExtendOptions
from .plan import own_tokens, row_counts

_CHAT: dict[str, Any] = {"max_user_tokens": 96, "max_reply_tokens": 512}  # those of `rope-patch rows`
_TEXT_TOKENS = 1024


def check(facts: ModelFacts, choices: Choices, texts: list[str]) -> None:
    """Make a row of questions of each length, to raise before any work if they do not fit.

    Raises:
        ValueError: the facts take more tokens than a row has.
    """
    value = choices.rows.value
    if "questions" not in value["shares"]:
        return
    lengths = {length: min(value["facts"], 8 if length == value["length"] else 3) for length in row_counts(choices)}
    for length, n in lengths.items():
        try:
            question_rows(facts.tokenizer, texts, 1, length=length, facts=n, chat=float(facts.is_chat))
        except ValueError as error:
            raise ValueError(
                f"rows of {length:,} tokens are too short for questions: {error} Give a larger --row-length, smaller "
                "--facts, or --short 0 to leave out the short rows."
            ) from error


def make(facts: ModelFacts, options: ExtendOptions, choices: Choices, texts: list[str], file: Path) -> dict[str, Any]:
    """Let the model write its own texts, mix rows and write them to `file`; returns what they contain."""
    value = choices.rows.value
    written = partial(_written, facts, options, own_tokens(choices))
    rows = make_rows(
        facts.tokenizer,
        value["n"],
        length=value["length"],
        texts=texts,
        chats=partial(written, "chats"),
        own_texts=partial(written, "own_texts"),
        shares=value["shares"],
        short=value["short"],
        facts=value["facts"],
        label_all=value["label_all"],
        seed=options.seed,
    )
    write_rows(file, rows)
    return {"contents": contents(rows), "rows": len(rows)}


def _written(facts: ModelFacts, options: ExtendOptions, tokens: int, kind: str) -> list[list[int]]:
    dtype = torch.float32 if options.device == "cpu" else facts.dtype
    model: Any = facts.load(dtype)
    model = model.to(options.device).eval()
    common: dict[str, Any] = {"temperature": 1.0, "seed": options.seed, "batch_size": None, "progress": True}
    if kind == "chats":
        texts = sampled_chats(model, facts.tokenizer, keep_unfinished=False, **_CHAT, **common)
    else:
        # small test models may have a window shorter than the default length
        longest = min(_TEXT_TOKENS, facts.window // 2)
        texts = sampled_texts(model, facts.tokenizer, max_tokens=longest, **common)
    written: list[list[int]] = []
    with tqdm(total=tokens, desc=f"{kind.replace('_', ' ')} of the model", unit="token", unit_scale=True) as bar:
        while bar.n < tokens:
            written.append(next(texts))
            bar.update(min(len(written[-1]), tokens - bar.n))
    del model, texts
    free_memory()
    return written
