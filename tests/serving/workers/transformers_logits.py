"""Logits of a plain Transformers, without this package. Run by `programs.run`: transformers_logits.py FOLDER JOBS.json

FOLDER holds another version than the installed one, or nothing.
"""

import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

sys.path.insert(0, sys.argv[1])
import numpy as np  # noqa: E402
import torch  # noqa: E402
from reduced import CHUNK, save  # noqa: E402
from transformers import AutoModelForCausalLM, PreTrainedModel  # noqa: E402


@torch.no_grad()
def logits(model: PreTrainedModel, ids: np.ndarray) -> Iterator[np.ndarray]:
    """Of a row, read at once, as a rescaling may follow its length."""
    hidden = model.model(torch.from_numpy(ids.astype(np.int64))[None], use_cache=False).last_hidden_state[0]
    for part in hidden.split(CHUNK):
        yield model.lm_head(part).numpy()


for job in json.loads(Path(sys.argv[2]).read_text()):
    try:
        model = AutoModelForCausalLM.from_pretrained(job["checkpoint"], torch_dtype=torch.float32).eval()
        assert "rope_patch" not in sys.modules
        save(job, partial(logits, model))
    except Exception as error:  # of any kind: it is the outcome
        Path(job["out"]).with_suffix(".error").write_text(f"{type(error).__name__}: {error}")
