"""What a plain Transformers makes of rows, without this package.

Run by `programs.run`: transformers_logits.py FOLDER JOBS.json. FOLDER holds another version than the installed one, or
nothing.
"""

import json
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, sys.argv[1])
import torch  # noqa: E402
from greedy import written  # noqa: E402
from reduced import save  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402
from transformers_reader import Reader  # noqa: E402

for job in json.loads(Path(sys.argv[2]).read_text()):
    try:
        model = AutoModelForCausalLM.from_pretrained(job["checkpoint"], torch_dtype=torch.float32).eval()
        assert "rope_patch" not in sys.modules
        reader = Reader(model)
        save(job, reader.logits, partial(written, reader.read))
    except Exception as error:  # of any kind: it is the outcome
        Path(job["out"]).with_suffix(".error").write_text(f"{type(error).__name__}: {error}")
