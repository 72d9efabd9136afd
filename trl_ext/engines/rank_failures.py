"""What ranks say where one command has started several: a failure once, at the end. Imports nothing heavy."""

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

FOLDER = "ROPE_PATCH_RANK_FAILURES"
"""In the environment of ranks that a command has started: the folder where they leave what made them fail."""


@dataclass(frozen=True)
class RankFailure:
    """Why a rank has ended.

    Args:
        rank: its number, from 0.
        status: with which it exits.
        text: a message on one line, or a traceback.
        seconds: when, since the epoch.
    """

    rank: int
    status: int
    text: str
    seconds: float

    @classmethod
    def first(cls, folder: Path) -> "RankFailure | None":
        """The first of those in `folder`: others fail in turn, as they wait for one that has gone."""
        failures = [cls(**json.loads(file.read_text(encoding="utf-8"))) for file in folder.glob("rank-*.json")]
        return min(failures, key=lambda failure: failure.seconds, default=None)


def is_started_rank() -> bool:
    """Whether this process is a rank of a command, which reports for all of them."""
    return FOLDER in os.environ


def leave_failure(text: str, status: int) -> None:
    """Leave the reason for which this rank ends to the command that has started it."""
    folder, rank = Path(os.environ[FOLDER]), int(os.environ.get("RANK", 0))
    unfinished = folder / f"unfinished-{rank}"  # the command may read while this is being written
    unfinished.write_text(json.dumps({"rank": rank, "status": status, "text": text, "seconds": time.time()}))
    # atomic, and only this name is looked for
    unfinished.rename(folder / f"rank-{rank}.json")
