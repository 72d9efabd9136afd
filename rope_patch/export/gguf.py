"""Writing GGUF files with the converter of llama.cpp."""

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from .programs import GGUF_NAME

_NAME = "convert_hf_to_gguf.py"
_TRIES_SENTENCEPIECE_FIRST = ("llama", "mistral")  # model types that the converter reads as LlamaModel


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
    """Start the converter, which takes seconds, to see that the packages it imports are installed.

    Raises:
        ImportError: it does not start, or a package that it imports later is missing.
    """
    done = subprocess.run([sys.executable, str(converter), "--help"], capture_output=True, text=True)
    if done.returncode:
        raise ImportError(f"{converter} does not start: {_last_line(done)}. {_remedy(converter)}")
    if find_spec("sentencepiece") is None:  # imported during the conversion of Llama and Gemma
        raise ImportError(f"{converter} needs the package sentencepiece. {_remedy(converter)}")


def require_known_tokenizer(model_type: str, tokenizer_json: str) -> None:
    """Raise ValueError for a byte-level tokenizer that the converter would silently take for SentencePiece's.

    It does if tokenizer.json of a Llama has `byte_fallback` and a sequence of decoders, as Transformers 5.17 writes
    them from GGUF files. llama.cpp would then read other tokens than the model was trained on.

    Args:
        model_type: of the model's config.
        tokenizer_json: contents of tokenizer.json.
    """
    if model_type not in _TRIES_SENTENCEPIECE_FIRST:
        return
    tokenizer = json.loads(tokenizer_json)
    model, decoder = tokenizer.get("model") or {}, tokenizer.get("decoder") or {}
    looks_like_it = model.get("type") == "BPE" and model.get("byte_fallback") and decoder.get("type") == "Sequence"
    pre_tokenizer = tokenizer.get("pre_tokenizer") or {}
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    if looks_like_it and any(step.get("type") == "ByteLevel" for step in steps):
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
        reason = _last_line(done) or "it wrote no file"
        remedy = f" {_remedy(converter)}" if "No module named" in reason else ""
        raise ValueError(f"{converter.name} did not convert the checkpoint: {reason}.{remedy}")


def _last_line(done: "subprocess.CompletedProcess[str]") -> str:
    """The last line of output, which is the error if there is one."""
    return (done.stderr or done.stdout).strip().rpartition("\n")[2].rstrip(".")


def _remedy(converter: Path) -> str:
    requirements = converter.parent / "requirements" / "requirements-convert_hf_to_gguf.txt"
    return f"Install what it needs with pip install -r {requirements}, or with pip install sentencepiece."
