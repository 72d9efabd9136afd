"""Distillation of hidden states, LongReD's short term: the baseline that relations are compared with."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from .distiller import Distiller, Tape
from .targets import checked_layers
from .teacher import CopiedTeacher, SharedTeacher


@dataclass(frozen=True, kw_only=True)
class HiddenTargets:
    """loss = weight sum_i mean over tokens of (1 - cos(h_student_i, h_teacher_i)), i in `layers`.

    Args:
        weight: of the sum; LongReD takes 5.
        layers: which hidden states, 0 the embeddings, i the output of layer i, the last one after the final norm. None
            means six spread evenly over 1 .. n_layers.

    Source: LongReD, arXiv:2502.07365, short-text distillation.
    """

    weight: float = 5.0
    layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not 0 < self.weight < float("inf"):
            raise ValueError(f"weight must be a number above 0, got {self.weight!r}.")
        object.__setattr__(self, "layers", checked_layers(self.layers))

    def chosen(self, n_layers: int) -> tuple[int, ...]:
        """The indices that count in a model of `n_layers` layers.

        Raises:
            ValueError: one of them does not exist.
        """
        if self.layers is None:
            return tuple(sorted({1 + round(k * (n_layers - 1) / 5) for k in range(6)}))
        if max(self.layers) > n_layers:
            raise ValueError(f"layers must be at most {n_layers}, the layers of this model, got {self.layers}.")
        return self.layers


class HiddenTape(Tape):
    """Hidden states of the teacher, and the sum over layers and tokens of 1 - cos."""

    teacher: list[torch.Tensor]
    distance: torch.Tensor


class HiddenDistiller(Distiller):
    """Distils hidden states of a teacher into a rescaled student while the student's forward runs.

    Args:
        model: the student, patched, bare or wrapped.
        targets: which hidden states count.
        teacher: the same weights with adapters off, or a frozen copy.

    Raises:
        ValueError: the student's RoPE is the teacher's, or a layer does not exist.
    """

    def __init__(self, model: nn.Module, targets: HiddenTargets, teacher: SharedTeacher | CopiedTeacher) -> None:
        super().__init__(model, teacher)
        self.targets = targets
        self.layers = targets.chosen(self.decoder.config.num_hidden_layers)

    def _new_tape(self, valid: torch.Tensor, document: torch.Tensor) -> HiddenTape:
        return HiddenTape(valid, document)

    def _keep_teacher(self, tape: HiddenTape, output: Any) -> None:
        tape.teacher = [output.hidden_states[i] for i in self.layers]

    def _compare_student(self, tape: HiddenTape, output: Any) -> None:
        distances = [
            1 - F.cosine_similarity(output.hidden_states[i].float(), teacher.float(), dim=-1)
            for i, teacher in zip(self.layers, tape.teacher, strict=True)
        ]
        tape.distance = torch.stack([d[tape.valid].sum() for d in distances]).sum()
