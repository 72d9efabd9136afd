"""The arms of research/experiments/rpsd_far.py: RPSD, what its paper compares it with, and controls of equal strength."""

from dataclasses import dataclass, field
from typing import Any

SELF = {"objective": "self-distill"}
SKIP = {**SELF, "view": "skip"}


@dataclass(frozen=True)
class Arm:
    """What is trained under ABF.

    Args:
        fields: of RopeSFTConfig, besides those of all arms; None for what is not trained.
        steps: as multiples of the others' steps.
        attention: implementation that it is trained with, None for Transformers' choice.
    """

    fields: dict[str, Any] | None = field(default_factory=dict)
    steps: float = 1.0
    attention: str | None = None

    @property
    def strength(self) -> float | None:
        """Of the perturbation that stands in for a view, None where there is none."""
        control: dict[str, Any] = (self.fields or {}).get("objective_args", {}).get("control", {})
        return control.get("strength")


def _control(kind: str, strength: float, attention: str | None = None) -> Arm:
    """A perturbation of the model in place of a view, in two passes of one batch."""
    return Arm({**SELF, "objective_args": {"control": {"kind": kind, "strength": strength}}}, attention=attention)


def arms(row: int, noise: float = 1.6, dropout: float = 0.01) -> dict[str, Arm]:
    """Arms by name.

    Args:
        row: tokens of a row.
        noise: on scores of attention, its standard deviation.
        dropout: share of features.
    """
    return {
        "abf": Arm(None),
        "next-token": Arm({"objective": "clm"}),
        # a step of self-distillation costs 1.6 of next-token training
        "next-token x1.6": Arm({"objective": "clm"}, steps=1.6),
        "pose": Arm({"objective": "clm", "view": "skip"}),
        "skip": Arm(SKIP),
        "skip, lambda .2": Arm({**SKIP, "objective_args": {"kl_weight": 0.2}}),
        "skip, lambda .5": Arm({**SKIP, "objective_args": {"kl_weight": 0.5}}),
        "skip, lambda 2": Arm({**SKIP, "objective_args": {"kl_weight": 2.0}}),
        "skip, Y = L/2": Arm({**SKIP, "view_args": {"skip": {"law": "uniform", "high": row // 2}}}),
        "skip, Y = 2 L": Arm({**SKIP, "view_args": {"skip": {"law": "uniform", "high": 2 * row}}}),
        "cyclic": Arm({**SELF, "view": "cyclic"}),
        # of a KL about as large as the skip's here: over its training dropout of .01 had .37 nats, the skip .32.
        # Noise of .5 had a tenth of the skip's before training, and its KL grows with the square of its strength.
        # Under SDPA noise makes a mask of n x n for each head, 18 GiB a layer; flex attention draws it score by score.
        "noise": _control("attention_noise", noise, "flex_attention"),
        "dropout": _control("dropout", dropout),
    }
