"""Logits of CTranslate2, by its own converter. Run by `programs.run`: ctranslate2_logits.py FOLDER JOBS.json"""

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, sys.argv[1])
import ctranslate2  # noqa: E402
import numpy as np  # noqa: E402
from ctranslate2.converters import TransformersConverter  # noqa: E402
from reduced import save  # noqa: E402


class WithoutTokenizer(TransformersConverter):
    """The converter of checkpoints, which names the tokens instead of loading a tokenizer."""

    vocabulary = 0

    def load_tokenizer(self, tokenizer_class: Any, model_name_or_path: str, **options: Any) -> Any:
        names = {f"<{token}>": token for token in range(self.vocabulary)}
        return SimpleNamespace(
            get_vocab=lambda: dict(names), bos_token="<1>", eos_token="<2>", unk_token="<0>", chat_template=None
        )


for job in json.loads(Path(sys.argv[2]).read_text()):
    out = Path(job["out"])
    converted = out.with_suffix(".ctranslate2")
    try:
        converter = WithoutTokenizer(job["checkpoint"])
        converter.vocabulary = job["vocabulary"]
        converter.convert(str(converted))
        generator = ctranslate2.Generator(str(converted), device="cpu", compute_type="float32", intra_threads=1)
        save(job, lambda ids, of=generator: np.array(of.forward_batch([ids.tolist()], return_log_probs=False)))
    except Exception as error:  # of any kind: it is the outcome
        out.with_suffix(".error").write_text(f"{type(error).__name__}: {error}")
    finally:
        shutil.rmtree(converted, ignore_errors=True)
