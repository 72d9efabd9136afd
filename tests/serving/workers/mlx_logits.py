"""What mlx-lm makes of rows on the CPU. Run by `programs.run`: mlx_logits.py FOLDER JOBS.json"""

import json
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, sys.argv[1])
import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402
from greedy import written  # noqa: E402
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache  # noqa: E402
from mlx_lm.utils import load_model  # noqa: E402
from reduced import CHUNK, save  # noqa: E402

mx.set_default_device(mx.cpu)


class Reader:
    """A model that reads one row at a time, in parts as `mlx_lm.server` does, and keeps it until the next."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.cache: list[Any] = []

    def logits(self, ids: np.ndarray) -> Iterator[np.ndarray]:
        """[tokens, vocabulary] of a row, in parts."""
        self.cache = make_prompt_cache(self.model)
        for first in range(0, len(ids), CHUNK):
            yield self._logits(ids[first : first + CHUNK])

    def read(self, ids: Sequence[int], place: int) -> np.ndarray:
        """[vocabulary] behind `ids`, which stand at `place`."""
        trim_prompt_cache(self.cache, self.cache[0].offset - place)
        return self._logits(np.array(ids))[-1]

    def _logits(self, ids: np.ndarray) -> np.ndarray:
        return np.array(self.model(mx.array(ids[None]), cache=self.cache)[0])


for job in json.loads(Path(sys.argv[2]).read_text()):
    try:
        model, _ = load_model(Path(job["checkpoint"]))
        reader = Reader(model)
        save(job, reader.logits, partial(written, reader.read))
    except Exception as error:  # of any kind: it is the outcome
        Path(job["out"]).with_suffix(".error").write_text(f"{type(error).__name__}: {error}")
