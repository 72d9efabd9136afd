"""GGUF by llama.cpp's own converter."""

import shutil
import subprocess
import sys
from pathlib import Path

from .programs import GGUF_NAME

_NAME = "convert_hf_to_gguf.py"


def find_converter(converter: str | Path | None) -> Path:
    """The converter that the user names, or the one on PATH.

    Raises:
        FileNotFoundError: there is none.
    """
    converter_path = shutil.which(_NAME) if converter is None else str(converter)
    if converter_path is not None and Path(converter_path).is_file():
        return Path(converter_path).resolve()
    where = "on PATH" if converter is None else f"at {converter}"
    raise FileNotFoundError(
        f"there is no {_NAME} {where}. Get it with `git clone https://github.com/ggml-org/llama.cpp` and `pip install "
        f"-r llama.cpp/requirements/requirements-convert_hf_to_gguf.txt`, and name it: --converter llama.cpp/{_NAME}, "
        "or converter=... in Python."
    )


def require_runs(converter: Path) -> None:
    """Start the converter, which shows that the packages it imports are there; that takes seconds.

    Raises:
        ImportError: it does not start.
    """
    done = subprocess.run([sys.executable, str(converter), "--help"], capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().rpartition("\n")[2]
        raise ImportError(
            f"{converter} does not start: {said} What it needs is installed by pip install -r "
            f"{converter.parent / 'requirements' / 'requirements-convert_hf_to_gguf.txt'}."
        )


def convert(converter: Path, folder: Path) -> None:
    """Write `model.gguf` into a folder with a checkpoint and its tokenizer.

    Raises:
        RuntimeError: the converter refuses the checkpoint.
    """
    out = folder / GGUF_NAME
    done = subprocess.run(
        [sys.executable, str(converter), str(folder), "--outfile", str(out)], capture_output=True, text=True
    )
    if done.returncode or not out.is_file():
        said = (done.stderr or done.stdout).strip()[-2000:]
        raise RuntimeError(f"{converter.name} did not convert the checkpoint: {said or 'it wrote no file.'}")
