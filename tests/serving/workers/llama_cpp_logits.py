"""What llama.cpp makes of rows, from a GGUF by its own converter.

Run by `programs.run`: llama_cpp_logits.py FOLDER JOBS.json
"""

import ctypes
import json
import os
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

SERVED_LENGTH = 2048  # llama-server -c

ROOT = Path(sys.argv[1])
SOURCES = ROOT / "vendor" / "llama.cpp"
os.environ["LLAMA_CPP_LIB_PATH"] = str(SOURCES / "build" / "bin")
sys.path[:0] = [str(SOURCES), str(SOURCES / "gguf-py")]
# its __init__ imports a server and caches, with dependencies of their own; the bindings need none of them
package = sys.modules["llama_cpp"] = ModuleType("llama_cpp")
package.__path__ = [str(ROOT / "llama_cpp")]

import gguf  # noqa: E402
import llama_cpp.llama_cpp as llama  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from conversion import get_model_class  # noqa: E402
from conversion.base import ModelBase  # noqa: E402
from greedy import written  # noqa: E402
from reduced import CHUNK, save  # noqa: E402


def convert(checkpoint: Path, gguf_file: Path) -> None:
    """Write a GGUF in float32 by the class that convert_hf_to_gguf.py takes, without a tokenizer."""
    hparams = ModelBase.load_hparams(checkpoint, False)
    converter = get_model_class(hparams["architectures"][0])

    class WithoutTokenizer(converter):
        model_arch = converter.model_arch

        def set_vocab(self) -> None:
            self.gguf_writer.add_tokenizer_model("no_vocab")

        def set_gguf_parameters(self) -> None:
            super().set_gguf_parameters()
            if f"{self.gguf_writer.arch}.vocab_size" not in self.gguf_writer.kv_data[0]:
                self.gguf_writer.add_vocab_size(hparams["vocab_size"])

    with torch.inference_mode():
        WithoutTokenizer(checkpoint, gguf.LlamaFileType.ALL_F32, gguf_file).write()


class Reader:
    """A model that reads one row at a time, in parts, in a fresh context, which stays until the next row."""

    def __init__(self, model: Any, vocabulary: int) -> None:
        self.model, self.vocabulary = model, vocabulary
        self.batch = llama.llama_batch_init(CHUNK, 0, 1)
        self.context: Any = None

    def free(self) -> None:
        self._drop_context()
        llama.llama_batch_free(self.batch)
        llama.llama_model_free(self.model)

    def logits(self, ids: np.ndarray) -> Iterator[np.ndarray]:
        """[tokens, vocabulary] float32 of a row, in parts."""
        self._drop_context()
        options = llama.llama_context_default_params()
        options.n_ctx = max(SERVED_LENGTH, len(ids))
        options.n_batch = options.n_ubatch = CHUNK
        options.n_threads = options.n_threads_batch = 1
        options.type_k = options.type_v = 0  # a cache in float32
        self.context = llama.llama_init_from_model(self.model, options)
        for first in range(0, len(ids), CHUNK):
            part = ids[first : first + CHUNK]
            self._decode(part, first)
            yield np.stack([self._logits_behind(i) for i in range(len(part))])

    def read(self, ids: Sequence[int], place: int) -> np.ndarray:
        """[vocabulary] behind `ids`, which stand at `place`."""
        llama.llama_memory_seq_rm(llama.llama_get_memory(self.context), 0, place, -1)
        self._decode(ids, place)
        return self._logits_behind(len(ids) - 1)

    def _drop_context(self) -> None:
        if self.context is not None:
            llama.llama_free(self.context)
            self.context = None

    def _decode(self, ids: Sequence[int] | np.ndarray, place: int) -> None:
        batch = self.batch
        batch.n_tokens = len(ids)
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = int(token), place + i, 1, 1
            batch.seq_id[i][0] = 0
        if status := llama.llama_decode(self.context, batch):
            raise RuntimeError(f"llama_decode gave {status}")

    def _logits_behind(self, i: int) -> np.ndarray:
        row = llama.llama_get_logits_ith(self.context, i)
        return np.ctypeslib.as_array(row, shape=(self.vocabulary,)).copy()


def load(gguf_file: Path) -> Any:
    options = llama.llama_model_default_params()
    options.use_mmap = False
    model = llama.llama_model_load_from_file(str(gguf_file).encode(), options)
    if not model:
        raise RuntimeError("llama.cpp does not load the GGUF")
    return model


silent = llama.llama_log_callback(lambda level, text, data: None)
llama.llama_log_set(silent, ctypes.c_void_p(0))
llama.llama_backend_init()
for job in json.loads(Path(sys.argv[2]).read_text()):
    out = Path(job["out"])
    try:
        gguf_file = Path(job["checkpoint"]) / "model.gguf"  # that `export` has written
        if not gguf_file.exists():
            gguf_file = out.with_suffix(".gguf")
            convert(Path(job["checkpoint"]), gguf_file)
        reader = Reader(load(gguf_file), job["vocabulary"])
        save(job, reader.logits, partial(written, reader.read))
        reader.free()
    except Exception as error:  # of any kind: it is the outcome
        out.with_suffix(".error").write_text(f"{type(error).__name__}: {error}")
    finally:
        out.with_suffix(".gguf").unlink(missing_ok=True)
