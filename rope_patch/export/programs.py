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


def _command(start: str, window_option: str = "") -> Callable[[Path, int | None], str]:
    """A command that ends with the folder and, if the program has an option for it, the context window."""

    def command(folder: Path, window: int | None) -> str:
        option = f" {window_option} {window}" if window_option and window is not None else ""
        return f"{start} {shlex.quote(str(folder))}{option}"

    return command


PROGRAMS: dict[str, Callable[[Path, int | None], str]] = {
    "transformers": _transformers,
    # without the option vLLM multiplies the window of some rope types by their factor once more
    # (for YaRN until https://github.com/vllm-project/vllm/pull/56446)
    "vllm": _command("vllm serve", "--max-model-len"),
    "sglang": _command("python -m sglang.launch_server --model-path", "--context-length"),
    "llama.cpp": lambda folder, window: _command("llama-server -m", "-c")(folder / GGUF_NAME, window),
    "mlx": _command("mlx_lm.server --model"),
}
"""Target -> function of (folder, context window in positions) that returns the command to serve the checkpoint."""
