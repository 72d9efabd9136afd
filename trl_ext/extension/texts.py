"""The user's documents, split into those to train on and those to measure on."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import load_dataset

from rope_patch.eval import read_texts, text_rows
from rope_patch.eval.results.cache import data_hash, files_hash
from rope_patch.prompts.text import require_file, standard_library_files, text_of

from ..data.data_files import READ_ERRORS, unreadable
from ..recipes.arguments import is_hub_id
from ..recipes.dataset import digests
from .facts import ModelFacts
from .options import ExtendOptions

_EVERY = 10  # one of this many documents is held out


@dataclass(frozen=True)
class Texts:
    """Documents.

    Args:
        train: to train on.
        held_out: to measure on, the longest first.
        source: of the held-out ones, in words.
    """

    train: list[str]
    held_out: list[str]
    source: str


def read(facts: ModelFacts, options: ExtendOptions, *, row_length: int, measured_length: int, n_rows: int) -> Texts:
    """Read the documents of `options.data`, and hold some out to measure on if they are long enough.

    There has to be text for a training row of `row_length` tokens and, to measure on, `n_rows` rows of
    `measured_length` tokens.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a file has no `text`, there is too little, or documents to measure on are trained on.
    """
    texts = documents(facts, options.data)
    try:
        text_rows(facts.tokenizer, texts, seq_len=row_length, n_rows=1)
    except ValueError as error:
        raise ValueError(
            f"--data has too little text for one training row of {row_length:,} tokens: {error}"
        ) from error
    if options.held_out:
        named = _longest_first(documents(facts, options.held_out))
        both = set(texts) & set(named)
        if both:
            raise ValueError(
                f"--held-out must have other documents than --data: {len(both)} are in both, one of which begins "
                f"{min(both)[:40]!r}. A model is not measured on its training text: remove them from one of the two."
            )
        held_out, cut = _measurable(facts, named, measured_length, n_rows)
        return Texts(texts, held_out, f"{', '.join(options.held_out)}{cut}")
    if len(texts) == 1:
        last = len(texts[0]) - len(texts[0]) // _EVERY
        others, held_out, source = [texts[0][:last]], [texts[0][last:]], "the last tenth of --data"
    else:
        held_out = _longest_first(texts[::_EVERY])
        measured = set(held_out)
        others = [text for i, text in enumerate(texts) if i % _EVERY and text not in measured]
        n_copies = len(texts) - len(others) - len(held_out)
        copies = f" with its {n_copies} cop{'y' if n_copies == 1 else 'ies'}" if n_copies else ""
        source = f"every {_EVERY}th document of --data{copies}"
    try:
        text_rows(facts.tokenizer, others, seq_len=row_length, n_rows=1)
        held_out, cut = _measurable(facts, held_out, measured_length, n_rows)
        return Texts(others, held_out, f"{source}, which is not trained on{cut}")
    except ValueError:  # one of the two parts is too short
        sources = (file.read_text(encoding="utf-8", errors="replace") for file in standard_library_files())
        trained = set(texts)  # --data may be these sources
        own = _longest_first([source for source in sources if source not in trained])
        _require(facts, own, measured_length, n_rows)
        why = "a tenth of --data is too short to be measured on"
        return Texts(texts, own, f"the sources of Python's standard library, as {why}")


def documents(facts: ModelFacts, sources: Sequence[str]) -> list[str]:
    """The documents in files, in all files of folders, and in data sets on the hub.

    Chats are texts that the model's chat template has written, without the token that begins every text.
    """
    tokenizer = facts.tokenizer
    begin = tokenizer.bos_token or ""

    def written(messages: list[dict[str, str]]) -> str:
        text: str = tokenizer.apply_chat_template(messages, tokenize=False)
        return text.removeprefix(begin)

    chat, texts = written if facts.is_chat else None, []
    for source in sources:
        if is_hub_id(source):
            rows = enumerate(_hub_rows(source), 1)
            texts += [text_of(row, f"row {number} of {source}", chat) for number, row in rows]
        else:
            texts += read_texts(_files(source), chat)
    return texts


def contents(sources: Sequence[str]) -> list[str | None]:
    """A hash of each source."""
    return [
        digests({"": _hub_rows(source)}, {})[""] if is_hub_id(source) else data_hash(*map(files_hash, _files(source)))
        for source in sources
    ]


def _files(source: str) -> list[Path]:
    path = Path(source)
    inside = sorted(file for file in path.rglob("*") if file.is_file() and not file.name.startswith("."))
    if not inside:
        require_file(path)
    return inside or [path]


def _hub_rows(name: str) -> Any:
    try:
        return load_dataset(name, split="train")
    except READ_ERRORS as error:
        raise unreadable([name], error) from error


def _longest_first(texts: list[str]) -> list[str]:
    return sorted(texts, key=len, reverse=True)


def _measurable(facts: ModelFacts, texts: list[str], length: int, n_rows: int) -> tuple[list[str], str]:
    """`texts` and ""; if they are too few for `n_rows` rows (a text gives one row), parts of them and a note.

    Each text is cut into as few parts as give the rows. A short text gives none, so that a long one gives more.
    """
    try:
        _require(facts, texts, length, n_rows)
        return texts, ""
    except ValueError as error:
        too_short = error
    for n_parts in range(max(2, -(-n_rows // max(len(texts), 1))), n_rows + 1):
        parts = _longest_first(
            [text[k * len(text) // n_parts : (k + 1) * len(text) // n_parts] for text in texts for k in range(n_parts)]
        )
        try:
            _require(facts, parts, length, n_rows)
            return parts, f", cut into {len(parts)} parts"
        except ValueError as error:
            too_short = error
    raise too_short


def _require(facts: ModelFacts, texts: list[str], length: int, n_rows: int) -> None:
    try:
        text_rows(facts.tokenizer, texts, seq_len=length, n_rows=n_rows)
    except ValueError as error:
        raise ValueError(f"--held-out is too short for {n_rows} rows of {length:,} tokens: {error}") from error
