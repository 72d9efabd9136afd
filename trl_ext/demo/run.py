"""The demo: unpack the model, write the texts, and call `extend`."""

import shutil
import sys
from pathlib import Path
from typing import Any

from ..extension.extending import Extended, extend
from .files import write_files
from .settings import NAME, settings


def run(folder: Path, device: str, given: dict[str, Any]) -> Extended:
    """Extend the embedded model; the same call resumes a stopped one.

    Args:
        folder: for all results and the unpacked model.
        device: "cpu" or "cuda".
        given: options of `extend` that the user has set.
    """
    options = settings(device, given)
    introduction = (
        f"This extends the context window of {NAME}, a small model, from 8,192 to {options['to']:,} tokens.\n"
        "It measures the model, trains it on this machine and measures it again. Nothing is downloaded. It is\n"
        "`rope-patch extend` with less training and fewer questions. Ctrl-C stops it; the same command resumes.\n\n"
    )
    model, library = write_files(folder, introduction)
    done = extend(model, data=library, output=folder / "extended", **options)
    assert isinstance(done, Extended)  # no plan, for mypy
    return done


def next_command(folder: Path) -> str:
    """The command to try next, in a form that works here."""
    typed = sys.argv[0] if Path(sys.argv[0]).name == "rope-patch" else f"{sys.executable} -m trl_ext"
    command = "rope-patch" if shutil.which("rope-patch") else typed
    return f"{command} extend {folder / NAME} --to 65536 --data YOUR_TEXTS.jsonl --output extended --dry-run"
