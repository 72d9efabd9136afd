"""The demo: unpack the model, write the texts, and call `extend`."""

import shutil
import sys
from pathlib import Path
from typing import Any

from ..extension.extending import Extended, extend
from .files import write_files
from .settings import MINUTES, NAME, TO, settings


def run(folder: Path, device: str, given: dict[str, Any]) -> Extended:
    """Extend the embedded model; the same call resumes a stopped one.

    Args:
        folder: for all results and the unpacked model.
        device: "cpu" or "cuda".
        given: options of `extend` that the user has set.
    """
    options = settings(device, given)
    takes = f"That takes about {MINUTES} minutes on two free cores."
    if given or device != "cpu":  # which was not timed
        takes = "The plan says how long that takes."
    introduction = (
        f"This extends the context window of {NAME}, a small model, from 8,192 to {options['to']:,} tokens.\n"
        "It measures the model as it came, then with RoPE scaling alone, which is one line, trains it and\n"
        f"measures it again. {takes} Nothing is downloaded.\n"
        "It is `rope-patch extend` with less training and fewer questions.\n"
        "Ctrl-C stops it; the same command resumes.\n\n"
    )
    model, library = write_files(folder, introduction)
    done = extend(model, data=library, output=folder / "extended", **options)
    assert isinstance(done, Extended)  # no plan, for mypy
    return done


def next_command(folder: Path, given: dict[str, Any]) -> str:
    """The command to try next, in a form that works here; target, device and seed are the user's, if they are set."""
    typed = sys.argv[0] if Path(sys.argv[0]).name == "rope-patch" else f"{sys.executable} -m trl_ext"
    command = "rope-patch" if shutil.which("rope-patch") else typed
    flags = "".join(f" --{name} {given[name]}" for name in ("device", "seed") if name in given)
    to = given.get("to", TO["cuda"])
    return f"{command} extend {folder / NAME} --to {to} --data YOUR_TEXTS.jsonl --output extended{flags} --dry-run"
