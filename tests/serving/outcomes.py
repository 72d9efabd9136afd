"""What became of each cell: a program's logits beside Transformers', on the same checkpoint."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from serving.checkpoints import (
    FORMS,
    HEAD_DIM,
    RESCALINGS,
    VOCABULARY,
    load,
    logits_of,
    rows_of,
    takes,
    token_ids,
    write_checkpoint,
)
from serving.programs import Program
from transformers import PreTrainedModel

RIGHT, WRONG, REFUSED = "right", "wrong", "refused"
# largest difference of logits, in standard deviations of the logits, that rounding may make
TOLERANCE = 0.1


@dataclass(frozen=True)
class Outcome:
    """One cell.

    Args:
        kind: right, wrong (the program said nothing), or refused (it raised an error).
        differences: of each row, largest difference of logits in standard deviations of the logits.
        error: what a program said that refused.
    """

    kind: str
    differences: dict[str, float]
    error: str = ""


def outcomes_of(program: Program, family: str, folder: Path) -> dict[tuple[str, str], Outcome]:
    """The outcome of each (form, rescaling) of `family`, whose checkpoints are written into `folder`."""
    np.save(folder / "ids.npy", token_ids().numpy().astype(np.int32))
    jobs: dict[tuple[str, str], dict[str, Any]] = {}
    for number, rescaling in enumerate(name for name in RESCALINGS if takes(family, name)):
        for form, checkpoint in write_checkpoint(folder / str(number), family, rescaling).items():
            jobs[form, rescaling] = {
                "checkpoint": str(checkpoint),
                "ids": str(folder / "ids.npy"),
                "rows": rows_of(rescaling),
                "vocabulary": VOCABULARY,
                "head_dim": HEAD_DIM,
                "out": str(folder / f"{number}-{FORMS.index(form)}.npz"),
            }
    program.run(list(jobs.values()))
    outcomes = {}
    for (form, rescaling), job in jobs.items():
        model = load(Path(jobs["as saved", rescaling]["checkpoint"]))
        outcomes[form, rescaling] = _outcome(program, model, job)
    return outcomes


def _outcome(program: Program, model: PreTrainedModel, job: dict[str, Any]) -> Outcome:
    out, rows = Path(job["out"]), job["rows"]
    refusal = out.with_suffix(".error")
    if refusal.exists():
        error = refusal.read_text()
        # a GPU reads beyond the table where a CPU raises
        ends = program.gives == "tables" and error.startswith("IndexError")
        return Outcome(WRONG if ends else REFUSED, {}, "its table ends before the row" if ends else error)
    arrays, expected = dict(np.load(out)), logits_of(model, rows)
    if program.gives == "tables":
        arrays = _logits_under(model, arrays, rows)
    differences = {row: difference(arrays[row], expected[row]) for row in rows}
    return Outcome(RIGHT if max(differences.values()) < TOLERANCE else WRONG, differences)


def difference(logits: np.ndarray, expected: np.ndarray) -> float:
    """Largest difference, in standard deviations of `expected`."""
    return float(np.abs(logits - expected).max() / expected.std())


def _logits_under(model: PreTrainedModel, tables: dict[str, np.ndarray], rows: dict[str, int]) -> dict[str, np.ndarray]:
    """Logits of `model` with a program's cosines and sines, [tokens, head_dim] of each row and layer type."""
    ids = token_ids()
    out = {}
    for row, length in rows.items():
        of_row = {name.partition("|")[0]: torch.from_numpy(t) for name, t in tables.items() if name.endswith(f"|{row}")}
        with _rotary_gives(model, of_row), torch.no_grad():
            out[row] = model(ids[:, :length], use_cache=False).logits[0].numpy()
    return out


@contextmanager
def _rotary_gives(model: PreTrainedModel, tables: dict[str, torch.Tensor]) -> Iterator[None]:
    rotary = model.get_decoder().rotary_emb

    def forward(x: torch.Tensor, position_ids: torch.Tensor, layer_type: str = "") -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = tables[layer_type].chunk(2, dim=-1)
        return torch.cat((cos, cos), dim=-1)[None], torch.cat((sin, sin), dim=-1)[None]

    rotary.forward = forward
    try:
        yield
    finally:
        del rotary.forward
