"""Where a training stands, in a file that `rope-patch status` reads. Imports nothing heavy."""

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from .folder import write_whole

_FILE = "_progress.json"  # files of such names are not pushed to the hub


@dataclass(frozen=True)
class Progress:
    """Where a training stood.

    Args:
        step: optimizer steps done.
        steps: in all.
        loss: the last that was logged.
        first_step: done when this process began to train.
        began: when that was, in seconds since the epoch.
        written: when this was.
    """

    step: int
    steps: int
    loss: float
    first_step: int
    began: float
    written: float

    @classmethod
    def read(cls, folder: Path) -> "Progress | None":
        """Of the training in `folder`, None if it has logged nothing."""
        file = folder / _FILE
        return cls(**json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else None

    def write(self, folder: Path) -> None:
        """Replace the file in `folder`."""
        write_whole(folder / _FILE, asdict(self))

    @property
    def minutes_left(self) -> float:
        """Minutes to the last step, at the mean speed so far."""
        seconds = (self.written - self.began) / max(self.step - self.first_step, 1)
        return max((self.steps - self.step) * seconds - (time.time() - self.written), 0.0) / 60
