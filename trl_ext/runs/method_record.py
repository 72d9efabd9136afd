"""Record the view, objective and options of a run beside its checkpoints; refuse to resume with others."""

import json
import os
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from transformers.utils import logging

from rope_patch.base.json_records import read_record
from rope_patch.model_card import RECORD_NAME
from rope_patch.version import __version__
from rope_patch.views import View

from ..config import RopeSFTConfig
from ..data.cues import CUES

logger = logging.get_logger(__name__)

_FORMAT = 1


def training_method(args: RopeSFTConfig, view: View, seed: int) -> dict[str, Any]:
    """The fields that define what is trained, with their defaults, as JSON reads them back.

    Left out are fields that change no number (`teacher_offload`, `passes` of "self-distill"), fields that TRL sets
    when it resumes, and `rescale`, whose RoPE parameters the checkpoint has.

    Args:
        args: of the trainer.
        view: of the run, from `args` or from the model.
        seed: of its draws.
    """
    method: dict[str, Any] = {
        "objective": args.objective,
        "objective_args": args.objective_options.record(),
        "view": view.name,
        "view_args": view.options(),
        "trainable": args.trainable,
        "long_documents": args.long_documents,
        "shifted_attention": args.shifted_attention,
        "cue": _texts(args.cue),
    }
    if view.perturbs:
        method["view_seed"] = seed
    # tuples become lists, as in a record that was read
    return json.loads(json.dumps(method, default=_as_json))


def record_of(method: dict[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    """The record of a run: its `training_method` and facts."""
    return {"format": _FORMAT, "rope_patch_version": __version__, **method, "run": run}


def require_same_method(method: dict[str, Any], checkpoint: str | os.PathLike[str]) -> None:
    """Raise ValueError if `checkpoint` was trained with another `training_method`.

    Only fields that both records have are compared. A checkpoint of plain TRL has no record and passes with a warning.
    """
    file = Path(checkpoint) / RECORD_NAME
    if not file.is_file():
        logger.warning(
            f"{checkpoint} has no {RECORD_NAME}, as plain TRL writes none: whether it was trained with the same view, "
            "objective and options is not known. It is resumed with those of this run."
        )
        return
    recorded = read_record(file, "Resume from another checkpoint, or start a new run from its weights.")
    if recorded.get("format") != _FORMAT:
        raise ValueError(f"{file} must be of format {_FORMAT}, got {recorded!r:.200}. Update rope-patch to read it.")
    for name in ("view", "objective"):
        if recorded.get(name) != method[name]:  # options of different ones cannot be compared
            recorded.pop(f"{name}_args", None)
    others = differences(recorded, method)
    if others:
        raise ValueError(
            f"{checkpoint} was trained with {', '.join(was for was, _ in others)}, and this run has "
            f"{', '.join(now for _, now in others)}. Give the values that it was trained with, or start a new run "
            "from its weights, in another output_dir and without resume_from_checkpoint: load it as the model, an "
            "adapter with rope_patch.load_adapter(base_model, checkpoint, is_trainable=True)."
        )


def differences(recorded: dict[str, Any], current: dict[str, Any], owner: str = "") -> list[tuple[str, str]]:
    """Fields that both have and that differ: (recorded, current) as name=value."""
    differing = []
    for name, now in current.items():
        was = recorded.get(name, now)  # a field that the record lacks is no difference
        if isinstance(was, dict) and isinstance(now, dict) and "law" not in now:  # a law is one value
            differing += differences(was, now, f"{owner}{name}.")
        elif was != now:
            differing.append((f"{owner}{name}={was!r:.200}", f"{owner}{name}={now!r:.200}"))
    return differing


def _texts(cue: str | list[str] | None) -> Any:
    """A cue, or each of a set, as its text in place of its name."""
    return [CUES.get(name, name) for name in cue] if isinstance(cue, list) else cue and CUES.get(cue, cue)


def _as_json(value: Any) -> Any:
    """A dataclass of options as its fields, anything else as text."""
    return {f.name: getattr(value, f.name) for f in fields(value)} if is_dataclass(value) else repr(value)
