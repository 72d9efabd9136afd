"""`rope-patch status`: where a run of `extend` or `train` stands, from the files in its folder."""

import argparse
import json
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from ..extension.steps import RECORD, RESULT, steps_done
from ..runs.folder import last_checkpoint, only_run
from ..runs.progress import Progress


def add_commands(commands: Any) -> None:
    """Add `status` to the subparsers."""
    status = commands.add_parser(
        "status",
        help="where a run of extend or train stands: step, loss, time left, last checkpoint, verdict",
        description="Print where a run of `rope-patch extend` or `rope-patch train` stands. It reads the files in the "
        "folder of the run, and may be called on another machine that sees them.",
    )
    status.set_defaults(run=run_status, output_dir=None)
    status.add_argument("folder", metavar="FOLDER", type=Path, help="the --output or output_dir of the run")


def run_status(args: argparse.Namespace) -> int:
    """Print the lines."""
    print("\n".join(status(args.folder)))
    return 0


def status(folder: Path) -> list[str]:
    """Where the run in `folder` stands.

    Raises:
        ValueError: there is no run.
    """
    record, recipe = folder / RECORD, folder / "recipe.json"
    if record.is_file():
        return _of_extension(folder, json.loads(record.read_text(encoding="utf-8")))
    names = []
    if recipe.is_file():
        names = json.loads(recipe.read_text(encoding="utf-8"))["stages"]
        left = [name for name in names if not (folder / name / "stage.json").is_file()]
        is_done = not left and (folder / "model/config.json").is_file()
        stage = folder / left[0] if left else folder / names[-1]
    else:
        stage, progress = folder, Progress.read(folder)
        is_done = progress is not None and progress.step == progress.steps
    if not names and Progress.read(stage) is None and last_checkpoint(stage) is None:
        raise ValueError(f"{folder} holds no run of rope-patch extend or train, or none that has logged a loss.")
    of, state = f", stage {stage.name} of {', '.join(names)}" if names else "", _state(folder, is_done)
    return [f"{folder}: training{of}, {state}", *_training(stage, state)]


def _of_extension(folder: Path, record: dict[str, Any]) -> list[str]:
    targets = [path.name.removeprefix("model-") for path in folder.glob("model-*") if path.is_dir()]
    steps = steps_done(folder, untrained=record["untrained"], targets=targets)
    left = [step for step, is_done in steps.items() if not is_done]
    result = folder / RESULT
    is_done = not left and result.is_file()
    state = _state(folder / "log.txt", is_done)
    lines = [f"{folder}: extending {record['model']} to {record['to']:,} positions, {state}"]
    if is_done:
        verdict = result.read_text(encoding="utf-8").partition("\n\n")[0]
        return [*lines, *verdict.splitlines(), f"All of it: {result} and {folder / 'report/report.html'}"]
    finished = [step for step, is_done in steps.items() if is_done]
    begun = max(file.stat().st_mtime for file in (folder / RECORD, *folder.glob("stages/*.json")))
    since = f", for {(time.time() - begun) / 60:.0f} minutes" if state == "running" else ""
    lines.append(f"Finished: {', '.join(finished) or 'nothing'}. Then: {left[0] if left else 'the report'}{since}.")
    if left and left[0] == "training and exporting":
        lines += _training(folder / "training", state)
    return lines


def _state(lock: Path, is_done: bool) -> str:
    """Whether a run is "finished", "running", which is while it holds its lock, or "stopped"."""
    if is_done or not lock.exists():
        return "finished" if is_done else "stopped"
    try:
        with only_run(lock, ""):
            return "stopped"
    except ValueError:
        return "running"


def _training(folder: Path, state: str) -> list[str]:
    """Step, loss, time left and last checkpoint of a training."""
    progress, checkpoint = Progress.read(folder), last_checkpoint(folder)
    lines = []
    if progress is not None:
        at = datetime.fromtimestamp(progress.written)
        left = f", about {progress.minutes_left:.0f} minutes left" if state == "running" else ""
        lines.append(f"Step {progress.step} of {progress.steps}, loss {progress.loss:.3f} at {at:%H:%M:%S}{left}.")
    return [*lines, f"Last checkpoint: {checkpoint or 'none yet'}"]
