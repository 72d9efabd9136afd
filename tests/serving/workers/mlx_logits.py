"""Logits of mlx-lm on the CPU. Run by `programs.run`: mlx_logits.py FOLDER JOBS.json"""

import json
import sys
from pathlib import Path

sys.path.insert(0, sys.argv[1])
import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402
from mlx_lm.utils import load_model  # noqa: E402

mx.set_default_device(mx.cpu)

for job in json.loads(Path(sys.argv[2]).read_text()):
    try:
        model, _ = load_model(Path(job["checkpoint"]))
        ids = mx.array(np.load(job["ids"]))
        logits = {row: np.array(model(ids[:, :length])[0]) for row, length in job["rows"].items()}
        np.savez(job["out"], **logits)
    except Exception as error:  # of any kind: it is the outcome
        Path(job["out"]).with_suffix(".error").write_text(f"{type(error).__name__}: {error}")
