"""Counts of trained tokens, over all ranks and up to a checkpoint."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from transformers import TrainerState

_KEPT = "rope_patch_tokens"  # its name in a checkpoint's trainer_state.json


@contextmanager
def counts_of_all_ranks(accelerator: Accelerator) -> Iterator[None]:
    """Make TRL's counts of tokens include all ranks.

    TRL gathers them by `gather_for_metrics`. At the end of an epoch that keeps one entry a document, and as each rank
    gives one count, counts of the last ranks would be lost.
    """
    accelerator.gather_for_metrics = accelerator.gather
    try:
        yield
    finally:
        del accelerator.gather_for_metrics


def keep_count(state: TrainerState, tokens: float) -> None:
    """Put the count into `state`, and so into the trainer_state.json of the next checkpoint; TRL does not save it."""
    kept: Any = state.stateful_callbacks
    kept[_KEPT] = {"tokens": tokens}


def tokens_until(checkpoint: str | Path) -> int:
    """Tokens that the run had trained on at `checkpoint`; without a saved count, the last logged one."""
    file = Path(checkpoint) / "trainer_state.json"
    if not file.is_file():
        return 0
    state = json.loads(file.read_text(encoding="utf-8"))
    if kept := state.get("stateful_callbacks", {}).get(_KEPT):
        return int(kept["tokens"])
    return int(max((entry.get("num_tokens", 0) for entry in state.get("log_history", [])), default=0))
