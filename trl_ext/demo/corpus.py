"""The text of the demo: the sources of Python's standard library, which every user has."""

import random
import sysconfig
from dataclasses import dataclass

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from rope_patch.eval import standard_library_files
from rope_patch.special_tokens import SpecialTokens, cut_document


@dataclass(frozen=True)
class Corpus:
    """Held-out rows and training rows from different files.

    Args:
        held_out: int64 [measure_rows, measure_length].
        train: int64 [at most train_rows, train_length], blocks of other files in random order.
        held_out_files: where `held_out` comes from.
    """

    held_out: torch.Tensor
    train: torch.Tensor
    held_out_files: tuple[str, ...]


def build(
    tokenizer: PreTrainedTokenizerBase,
    *,
    measure_length: int,
    measure_rows: int,
    train_length: int,
    train_rows: int,
    seed: int,
) -> Corpus:
    """Tokenize as many files as needed, long ones first; of the first, every second is held out.

    A held-out row is one file if that is long enough, else several, one after the other. Every row begins as the
    tokenizer begins a text.

    Args:
        tokenizer: of the model.
        measure_length: tokens in a held-out row.
        measure_rows: held-out rows.
        train_length: tokens in a training row.
        train_rows: training rows wanted; a small library gives fewer, which are then seen several times.
        seed: of the order of the training rows.

    Raises:
        ValueError: the standard library here is too small for even one training row beside the held-out ones.
    """
    held_out: list[torch.Tensor] = []
    names: list[str] = []
    train: list[torch.Tensor] = []
    open_row: list[int] = []
    special = SpecialTokens.of(tokenizer)
    with tqdm(total=measure_rows + train_rows, desc="tokenizing", unit="row") as bar:
        for number, file in enumerate(standard_library_files()):
            if len(held_out) == measure_rows and len(train) >= train_rows:
                break
            if number % 2 == 1 and len(train) >= train_rows:
                continue
            text = file.read_text(encoding="utf-8", errors="replace")
            ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            if number % 2 == 0 and len(held_out) < measure_rows:
                names.append(file.name)
                open_row += ids
                for row in cut_document(open_row, measure_length, special, keep_rest=False)[:1]:
                    held_out.append(torch.tensor(row))
                    open_row = []
            else:
                train += [torch.tensor(row) for row in cut_document(ids, train_length, special, keep_rest=False)]
            bar.update(min(len(held_out) + len(train), bar.total) - bar.n)
    if len(held_out) < measure_rows or not train:
        raise ValueError(
            f"the standard library in {sysconfig.get_paths()['stdlib']} gives {len(held_out)} rows of {measure_length} "
            f"tokens and {len(train)} of {train_length}; {measure_rows} and at least 1 are needed. Use shorter rows."
        )
    random.Random(seed).shuffle(train)
    return Corpus(torch.stack(held_out), torch.stack(train[:train_rows]), tuple(names))
