"""Logits of mlx-lm on the CPU. Run by `programs.run`: mlx_logits.py FOLDER JOBS.json"""

import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, sys.argv[1])
import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402
from mlx_lm.models.cache import make_prompt_cache  # noqa: E402
from mlx_lm.utils import load_model  # noqa: E402
from reduced import CHUNK, save  # noqa: E402

mx.set_default_device(mx.cpu)


def logits(model: Any, ids: np.ndarray) -> Iterator[np.ndarray]:
    """Of a row, read in parts as `mlx_lm.server` does."""
    cache = make_prompt_cache(model)
    for first in range(0, len(ids), CHUNK):
        yield np.array(model(mx.array(ids[None, first : first + CHUNK]), cache=cache)[0])


for job in json.loads(Path(sys.argv[2]).read_text()):
    try:
        model, _ = load_model(Path(job["checkpoint"]))
        save(job, partial(logits, model))
    except Exception as error:  # of any kind: it is the outcome
        Path(job["out"]).with_suffix(".error").write_text(f"{type(error).__name__}: {error}")
