"""The programs that checkpoints are exported for, and the command with which each serves one."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path

GGUF_NAME = "model.gguf"


def _transformers(folder: Path, window: int | None) -> str:
    quoted = json.dumps(str(folder), ensure_ascii=False)  # in double quotes, as the shell's are single ones
    code = f'from transformers import pipeline; print(pipeline("text-generation", {quoted})("Hello"))'
    return f"python -c {shlex.quote(code)}"


def _vllm(folder: Path, window: int | None) -> str:
    # without the option vLLM multiplies the window of some rope types by their factor once more
    return f"vllm serve {shlex.quote(str(folder))}{_option('--max-model-len', window)}"


def _sglang(folder: Path, window: int | None) -> str:
    return (
        f"python -m sglang.launch_server --model-path {shlex.quote(str(folder))}{_option('--context-length', window)}"
    )


def _llama_cpp(folder: Path, window: int | None) -> str:
    return f"llama-server -m {shlex.quote(str(folder / GGUF_NAME))}{_option('-c', window)}"


def _mlx(folder: Path, window: int | None) -> str:
    return f"mlx_lm.server --model {shlex.quote(str(folder))}"


def _option(name: str, value: int | None) -> str:
    return "" if value is None else f" {name} {value}"


PROGRAMS: dict[str, Callable[[Path, int | None], str]] = {
    "transformers": _transformers,
    "vllm": _vllm,
    "sglang": _sglang,
    "llama.cpp": _llama_cpp,
    "mlx": _mlx,
}
"""Target -> function of (folder, context window in positions) that returns the command to serve the checkpoint."""
