"""Distillation of hidden states, LongReD's short and short-to-long terms: a baseline."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from ..checked_numbers import require_number
from ..forward_loss import DecoderCall, Steps, Tape
from ..patch import rope_view
from .distiller import Distiller
from .targets import checked_layers
from .teacher import CopiedTeacher, SharedTeacher


@dataclass(frozen=True, kw_only=True)
class HiddenTargets:
    """loss = weight sum_i mean over tokens of (1 - cos(h_student_i, h_teacher_i)), i in `layers`, + short_to_long far.

    far = mean over tokens of (1 - cos(g_student, h_teacher)) of last hidden states, g_student under the sampled view.
    The teacher reads true positions. With short_to_long = 0 and a view in force, h_student is under the view; otherwise
    it is under true positions, beside a second pass under the view, on the same rows.

    Args:
        weight: of the sum; LongReD takes 5.
        short_to_long: of far; LongReD takes 10, and rows of its own, of the native window; 0 leaves it out.
        layers: which hidden states, 0 the embeddings, i the output of layer i, the last one after the final norm. None
            means six spread evenly over 1 .. n_layers.

    Source: LongReD, arXiv:2502.07365, short-text and short-to-long distillation. Its third term is next-token loss on
        long rows, which a second run has.
    """

    weight: float = 5.0
    short_to_long: float = 0.0
    layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        require_number("weight", self.weight)
        require_number("short_to_long", self.short_to_long, least=0)
        object.__setattr__(self, "layers", checked_layers(self.layers))
        if self.layers == (0,) and not self.short_to_long:
            raise ValueError(
                "layers=[0] are the embeddings, which teacher and student begin with alike: there is nothing to distil."
            )

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
    """Sums of 1 - cos come back: over layers and tokens, and over tokens of the last states."""

    distance: torch.Tensor
    far: torch.Tensor | None = None  # only in training

    @property
    def held(self) -> torch.Tensor:
        """Which of the rank's tokens are real, bool [batch, n or fewer]."""
        return self.valid if self.shard is None else self.shard.local(self.valid)


class HiddenDistiller(Distiller):
    """Distils hidden states of a teacher into a rescaled student while the student's forward runs.

    Args:
        model: the student, patched, bare or wrapped.
        targets: which hidden states count.
        teacher: the same weights with adapters off, or a frozen copy.

    Raises:
        ValueError: the student's RoPE is the teacher's, a layer does not exist, or short_to_long has no view.
    """

    def __init__(self, model: nn.Module, targets: HiddenTargets, teacher: SharedTeacher | CopiedTeacher) -> None:
        super().__init__(model, teacher)
        self.targets = targets
        self.layers = targets.chosen(self.decoder.config.num_hidden_layers)
        source = None if self.state is None else self.state.source
        if targets.short_to_long and (source is None or not source.view.perturbs):
            raise ValueError("short_to_long compares a view with true positions: give view='cream' or another.")
        if targets.short_to_long and self.state is not None and self.state.layers_call_rotary:
            raise ValueError(
                f"{type(self.causal_lm).__name__} computes RoPE inside its layers, which have one view a step, and "
                "short_to_long needs two: leave it at 0."
            )

    def _new_tape(self, valid: torch.Tensor, document: torch.Tensor) -> HiddenTape:
        return HiddenTape(valid, document)

    def _steps(self, tape: HiddenTape, call: DecoderCall) -> Steps:
        taught = self._ask_teacher(tape, call)
        chosen, last = [taught.hidden_states[i] for i in self.layers], taught.last_hidden_state
        del taught
        two_passes = self.targets.short_to_long and self.decoder.training
        if two_passes:
            with rope_view(self.decoder, "standard"):
                tape.distance = self._distance(tape, call.run_before(), chosen)
        output = yield None
        if two_passes:
            tape.far = _one_minus_cos(output.last_hidden_state, last, tape.held)
        else:
            tape.distance = self._distance(tape, output, chosen)

    def _distance(self, tape: HiddenTape, output: Any, teacher: list[torch.Tensor]) -> torch.Tensor:
        pairs = zip(self.layers, teacher, strict=True)
        return torch.stack([_one_minus_cos(output.hidden_states[i], t, tape.held) for i, t in pairs]).sum()


def _one_minus_cos(student: torch.Tensor, teacher: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Sum over real tokens."""
    return (1 - F.cosine_similarity(student.float(), teacher.float(), dim=-1))[valid].sum()
