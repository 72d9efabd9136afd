"""The steps of an extension, and which of them the files in its folder say are done. Imports nothing heavy."""

from collections.abc import Sequence
from pathlib import Path

RECORD = "extend.json"
"""What an extension was asked for and has chosen, in its folder."""
RESULT = "result.txt"
"""What `extend` prints at its end, the verdict first, in its folder."""


def stage_file(folder: Path, step: str) -> Path:
    """The file with the figures of "before", "untrained", "rows" or "after", which a finished one has."""
    return folder / "stages" / f"{step}.json"


def is_trained(folder: Path) -> bool:
    """Whether the result of the training was exported; the folder of the training may be gone since."""
    return (folder / "model/config.json").is_file()


def steps_done(folder: Path, *, untrained: bool, targets: Sequence[str]) -> dict[str, bool]:
    """Step, in words and in order -> whether it is done.

    Args:
        folder: of the extension.
        untrained: whether the RoPE scaling alone is measured.
        targets: programs besides Transformers.
    """
    return {
        "measuring the model as it is": stage_file(folder, "before").is_file(),
        **({"measuring it untrained": stage_file(folder, "untrained").is_file()} if untrained else {}),
        "making training rows": stage_file(folder, "rows").is_file(),
        "training and exporting": is_trained(folder),
        "measuring it again": stage_file(folder, "after").is_file(),
        **{f"exporting for {t}": (folder / f"model-{t}/config.json").is_file() for t in targets},
    }
