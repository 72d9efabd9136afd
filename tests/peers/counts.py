"""How many models a run with `patch_every_model` patched and refused."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Counts:
    patched: Mapping[str, int]  # of each class
    refused: Mapping[str, int]  # of each "class: error"


def read_counts(file: Path) -> Counts:
    return Counts(**json.loads(file.read_text()))


def surprises(counts: Counts, classes: Iterable[str], errors: Iterable[str] = ()) -> list[str]:
    """What is not as it should be: each of `classes` was patched, and nothing refused but with one of `errors`."""
    lines = [f"{name}: none was patched" for name in classes if not counts.patched.get(name)]
    for refusal, times in counts.refused.items():
        if not any(error in refusal for error in errors):
            lines.append(f"{times} times refused, {refusal}")
    return lines
