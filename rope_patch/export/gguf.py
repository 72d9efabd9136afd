"""GGUF by llama.cpp's own converter."""

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .programs import GGUF_NAME

_NAME = "convert_hf_to_gguf.py"
_TRIES_SENTENCEPIECE_FIRST = ("llama", "mistral")  # model types of its class LlamaModel


def find_converter(converter: str | Path | None) -> Path:
    """The converter that the user names, or the one on PATH.

    Raises:
        FileNotFoundError: there is none.
    """
    converter_path = shutil.which(_NAME) if converter is None else os.path.expanduser(converter)
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
        ImportError: it does not start, or lacks what it imports later.
    """
    done = subprocess.run([sys.executable, str(converter), "--help"], capture_output=True, text=True)
    if done.returncode:
        raise ImportError(f"{converter} does not start: {_last_line(done)}. {_remedy(converter)}")
    if find_spec("sentencepiece") is None:  # which it imports for Llama and Gemma, when it has begun
        raise ImportError(f"{converter} needs the package sentencepiece. {_remedy(converter)}")


def require_known_tokenizer(model_type: str, tokenizer_json: str) -> None:
    """Refuse a tokenizer of bytes that the converter would take for SentencePiece's, in silence.

    It does where a Llama's tokenizer.json has `byte_fallback` and a sequence of decoders, as those have that
    Transformers 5.17 makes from GGUF files: llama.cpp then reads other tokens than the model was trained on.

    Args:
        model_type: of the model's config.
        tokenizer_json: what tokenizer.json says.

    Raises:
        ValueError: it would be taken for another.
    """
    if model_type not in _TRIES_SENTENCEPIECE_FIRST:
        return
    tokenizer = json.loads(tokenizer_json)
    model, decoder = tokenizer.get("model") or {}, tokenizer.get("decoder") or {}
    taken = model.get("type") == "BPE" and model.get("byte_fallback") and decoder.get("type") == "Sequence"
    if taken and _splits_into_bytes(tokenizer.get("pre_tokenizer")):
        raise ValueError(
            f"{_NAME} would take this tokenizer for SentencePiece's, and llama.cpp would read other tokens: "
            "tokenizer.json splits text into bytes (ByteLevel), and has byte_fallback too. Save the tokenizer with "
            "Transformers 5.23 or newer, or set model.byte_fallback to false in tokenizer.json."
        )


def convert(converter: Path, folder: Path) -> None:
    """Write `model.gguf` into a folder with a checkpoint and its tokenizer.

    Raises:
        ValueError: the converter refuses the checkpoint.
    """
    out = folder / GGUF_NAME
    command = [sys.executable, str(converter), str(folder), "--outfile", str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode or not out.is_file():
        said = _last_line(done) or "it wrote no file"
        remedy = f" {_remedy(converter)}" if "No module named" in said else ""
        raise ValueError(f"{converter.name} did not convert the checkpoint: {said}.{remedy}")


def _splits_into_bytes(pre_tokenizer: dict[str, Any] | None) -> bool:
    parts = (pre_tokenizer or {}).get("pretokenizers", [pre_tokenizer or {}])
    return any(part.get("type") == "ByteLevel" for part in parts)


def _last_line(done: "subprocess.CompletedProcess[str]") -> str:
    """Of what it wrote, which is the error where there is one."""
    return (done.stderr or done.stdout).strip().rpartition("\n")[2].rstrip(".")


def _remedy(converter: Path) -> str:
    requirements = converter.parent / "requirements" / "requirements-convert_hf_to_gguf.txt"
    return f"What it needs is installed by pip install -r {requirements}, or by pip install sentencepiece."
