"""The demo: the model is unpacked, the texts are written, and `extend` does the rest."""

import shutil
import sys
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

from rope_patch.eval.report import require_writable

from ..extension.extending import Extended, extend
from ..extension.messages import others_quiet
from .library import write_library
from .model import embedded_file, is_unpacked, unpack_embedded
from .settings import NAME, settings


def run(folder: Path, device: str, given: dict[str, Any]) -> Extended:
    """Extend the embedded model in `folder`, where the same call goes on after it was stopped.

    Args:
        folder: of everything, the unpacked model included.
        device: "cpu" or "cuda".
        given: options of `extend`, in place of the demo's.

    Raises:
        FileNotFoundError: the package with the model is not installed.
        ValueError: what `extend` raises for.
    """
    model, library = folder / NAME, folder / "library.jsonl"
    options = settings(device, given)
    if not is_unpacked(model):
        file = embedded_file()
        require_writable(folder)
        print(
            f"This takes {NAME}, a small model that reads texts of up to 8,192 tokens, to {options['to']:,}.\n"
            "It measures the model, trains it on this machine, measures it again, and says what was won and lost.\n"
            "All that it needs is installed. It is `rope-patch extend` with less training and fewer questions than\n"
            "that would choose. Ctrl-C stops it, and the same command goes on.\n\n"
            f"Unpacking the model from the package of {file.name}.",
            flush=True,
        )
        with others_quiet(), redirect_stderr(StringIO()):  # a bar of a few seconds, without a switch of its own
            unpack_embedded(model)
    write_library(library)
    done = extend(model, data=library, output=folder / "extended", **options)
    assert isinstance(done, Extended)  # and not a plan
    return done


def next_command(folder: Path) -> str:
    """What to type after the demo, as it can be typed here."""
    typed = sys.argv[0] if Path(sys.argv[0]).name == "rope-patch" else f"{sys.executable} -m trl_ext"
    command = "rope-patch" if shutil.which("rope-patch") else typed
    return f"{command} extend {folder / NAME} --to 65536 --data YOUR_TEXTS.jsonl --output extended --dry-run"
