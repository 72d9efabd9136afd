"""Logits of ONNX Runtime, of a model by ONNX Runtime GenAI's builder. Run by `programs.run`: .. FOLDER JOBS.json"""

import json
import shutil
import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

FOLDER = Path(sys.argv[1])
sys.path[:0] = [str(FOLDER), str(FOLDER / "onnxruntime_genai" / "models")]
# its __init__ loads the runtime of tokenizers and sampling, which is not asked here
package = sys.modules["onnxruntime_genai"] = ModuleType("onnxruntime_genai")
package.__path__ = [str(FOLDER / "onnxruntime_genai")]

import numpy as np  # noqa: E402
import onnxruntime  # noqa: E402
from onnxruntime_genai.models import builder  # noqa: E402
from reduced import save  # noqa: E402

# a checkpoint without a tokenizer
builder.AutoTokenizer = SimpleNamespace(from_pretrained=lambda *args, **options: None)
builder.add_special_token_ids = lambda config, tokenizer: None
# both write files for the runtime of tokenizers and sampling
builder.Model.make_genai_config = builder.Model.save_processing = lambda *args, **options: None


def build(checkpoint: str, folder: Path) -> onnxruntime.InferenceSession:
    """The model that the builder writes for a CPU, in float32."""
    places = ("", checkpoint, str(folder), "fp32", "cpu", str(folder / "cache"))
    builder.create_model(*places, **builder.parse_extra_options(*places, []))
    return onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])


def logits(session: onnxruntime.InferenceSession, head_dim: int, ids: np.ndarray) -> np.ndarray:
    """[1, tokens, vocabulary] of one row without a past."""
    length = len(ids)
    inputs: dict[str, Any] = {
        "input_ids": ids[None].astype(np.int64),
        "attention_mask": np.ones((1, length), np.int64),
        "position_ids": np.arange(length)[None],
    }
    for expected in session.get_inputs():
        if expected.name.startswith("past_key_values"):
            inputs[expected.name] = np.zeros((1, expected.shape[1], 0, head_dim), np.float32)
    names = {expected.name for expected in session.get_inputs()}
    return session.run(["logits"], {name: array for name, array in inputs.items() if name in names})[0]


onnxruntime.set_default_logger_severity(3)
for job in json.loads(Path(sys.argv[2]).read_text()):
    out = Path(job["out"])
    built = out.with_suffix(".onnx")
    try:
        session = build(job["checkpoint"], built)
        save(job, partial(logits, session, job["head_dim"]))
    except Exception as error:  # of any kind: it is the outcome
        out.with_suffix(".error").write_text(f"{type(error).__name__}: {error}")
    finally:
        shutil.rmtree(built, ignore_errors=True)
