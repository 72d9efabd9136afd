"""Distillation of hidden states, LongReD's short and short-to-long terms: a baseline."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from ..base.validators import require_number
from ..patch import rope_view
from .distiller import Distiller
from .forward_loss import DecoderCall, LossRequest
from .targets import checked_layers
from .teacher import CopiedTeacher, SharedTeacher


@dataclass(frozen=True, kw_only=True)
class HiddenTargets:
    """loss = weight sum_i mean over tokens of (1 - cos(h_student_i, h_teacher_i)), i in `layers`, + short_to_long far.

    far = mean over tokens of (1 - cos(g_student, h_teacher)) of last hidden states, g_student under the sampled view.
    The teacher reads true positions. With short_to_long = 0, h_student comes from the one forward of the student, under
    the view if there is one. Otherwise h_student is at true positions, and a second pass, under the view, gives
    g_student.

    Args:
        weight: of the sum; LongReD uses 5.
        short_to_long: weight of far; 0 leaves it out. LongReD uses 10 and separate sequences of the native window.
        layers: which hidden states, 0 the embeddings, i the output of layer i, the last one after the final norm. None
            means six spread evenly over 1 .. n_layers.

    Source: LongReD, arXiv:2502.07365, short-text and short-to-long distillation. Its third term, the next-token
        loss on long sequences, is a training stage of its own here.
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
                "layers=[0] are the embeddings, which teacher and student have in common: there is nothing to distil."
            )

    def layer_indices(self, n_layers: int) -> tuple[int, ...]:
        """The indices that count in a model of `n_layers` layers.

        Raises:
            ValueError: one of them does not exist.
        """
        if self.layers is None:
            return tuple(sorted({1 + round(k * (n_layers - 1) / 5) for k in range(6)}))
        if max(self.layers) > n_layers:
            raise ValueError(f"layers must be at most {n_layers}, the layers of this model, got {self.layers}.")
        return self.layers


class HiddenRequest(LossRequest):
    """The forward writes two sums of 1 - cos: over layers and tokens, and over tokens of the last hidden states."""

    distance: torch.Tensor
    far: torch.Tensor | None = None  # only in training
    taught: list[torch.Tensor]  # the teacher's hidden states, [batch, n, H_t] each
    last: torch.Tensor | None = None  # its last ones, [batch, n, H_t], if a forward under the view is compared too

    @property
    def held(self) -> torch.Tensor:
        """Which of this rank's tokens are real, bool [batch, tokens of the rank]."""
        return self.valid if self.shard is None else self.shard.local(self.valid)


class HiddenDistiller(Distiller):
    """Distils hidden states of a teacher into a rescaled student while the student's forward runs.

    Args:
        model: the student, patched, bare or wrapped.
        targets: which hidden states count.
        teacher: the same weights with adapters off, or a frozen copy.

    Raises:
        ValueError: student and teacher have the same RoPE, a layer does not exist, or short_to_long has no view.
    """

    def __init__(self, model: nn.Module, targets: HiddenTargets, teacher: SharedTeacher | CopiedTeacher) -> None:
        super().__init__(model, teacher)
        self.targets = targets
        self.layers = targets.layer_indices(self.decoder.config.num_hidden_layers)
        source = None if self.state is None else self.state.source
        if targets.short_to_long and (source is None or not source.view.perturbs):
            raise ValueError("short_to_long compares a view with true positions: give view='cream' or another.")
        if targets.short_to_long and self.state is not None and self.state.layers_call_rotary:
            raise ValueError(
                f"{type(self.causal_lm).__name__} computes RoPE inside its layers, so a step has one view, and "
                "short_to_long needs two: leave it at 0."
            )

    def _new_request(self, valid: torch.Tensor, document: torch.Tensor) -> HiddenRequest:
        return HiddenRequest(valid, document)

    def before(self, request: HiddenRequest, call: DecoderCall) -> None:
        taught = self._ask_teacher(request, call)
        request.taught = [taught.hidden_states[i] for i in self.layers]
        if self.targets.short_to_long and self.decoder.training:
            request.last = taught.last_hidden_state
            del taught  # its other layers' states, before the student runs
            with rope_view(self.decoder, "standard"):
                # an extra forward at true positions; the one that was called runs under the view
                self._write_distance(request, call.run_before())

    def after(self, request: HiddenRequest, output: Any) -> None:
        if request.last is None:
            self._write_distance(request, output)
        else:
            request.far = _one_minus_cos(output.last_hidden_state, request.last, request.held)
            request.last = None

    def _write_distance(self, request: HiddenRequest, output: Any) -> None:
        pairs = zip(self.layers, request.taught, strict=True)
        states = [_one_minus_cos(output.hidden_states[i], taught, request.held) for i, taught in pairs]
        request.distance = torch.stack(states).sum()
        del request.taught


def _one_minus_cos(student: torch.Tensor, teacher: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Sum over real tokens of states [batch, n, H]."""
    return (1 - F.cosine_similarity(student.float(), teacher.float(), dim=-1))[valid].sum()
