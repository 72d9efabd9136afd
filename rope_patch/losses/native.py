"""Knowledge distillation from the pretrained model at true positions to the model under a view, for every token."""

from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from torch import nn

from rope_kernels import RowMetrics
from rope_kernels.vocabulary.checks import IGNORE_INDEX

from ..base.validators import require_number
from ..families.capabilities import why_no_losses
from ..layout.labelled import Labelled
from .consistency import Direction
from .distiller import Distiller
from .forward_loss import DecoderCall, LossRequest, require
from .heads import head_losses
from .teacher import CopiedTeacher, SharedTeacher


@dataclass(frozen=True, kw_only=True)
class NativeTargets:
    """Loss of a model that keeps the predictions of pretraining.

    loss = weight mean over tokens of KL(q_t || p_t) + clm_weight mean over labels of -ln p(label) + text_weight mean
    over next tokens of -ln p(next token).

    p is the student's next-token distribution under the view in force, q that of the model as it was pretrained:
    adapters off or a frozen copy, native RoPE, true positions. The KL counts every token that is not padding, also
    those without a label and the last token of a document. Next tokens are all tokens of a document but its first,
    labels or not; a label counts in both means. Evaluation computes the same loss at true positions.

    Args:
        weight: weight of the KL; 0 trains next-token losses only, without a teacher.
        clm_weight: weight of the cross-entropy of labels under the view; with prompts masked, these are answers. It
            teaches what the teacher does not know, such as an answer whose key is far away. With 0, only evaluation
            measures it.
        text_weight: weight of the cross-entropy of all next tokens under the view. It lowers the loss on running text
            below that of the pretrained model, and moves the model further from its predictions.
        temperature: divides the logits of both sides of the KL; the KL is not multiplied by its square.
        direction: "forward" KL(q || p), "reverse" KL(p || q), or their Jensen-Shannon divergence "jsd".

    Source: ours. LongReD's short-to-long distillation (arXiv:2502.07365) compares last hidden states of the same two
        passes by cosine, PoSE (arXiv:2309.10400) has the views, and fine-tuning with a KL to the initial model
        has the sum of cross-entropy and KL.
    """

    weight: float = 1.0
    clm_weight: float = 0.1
    text_weight: float = 0.0
    temperature: float = 1.0
    direction: Direction = "forward"

    def __post_init__(self) -> None:
        for name in ("weight", "clm_weight", "text_weight"):
            require_number(name, getattr(self, name), least=0)
        require_number("temperature", self.temperature)
        if self.direction not in get_args(Direction):
            raise ValueError(f"direction must be one of {get_args(Direction)}, got {self.direction!r}.")
        if not (self.weight or self.has_ce):
            raise ValueError(
                "weight, clm_weight and text_weight are all 0, so there is nothing to learn: set one above 0."
            )

    @property
    def has_ce(self) -> bool:
        """Whether a cross-entropy is trained."""
        return bool(self.clm_weight or self.text_weight)


class NativeRequest(LossRequest):
    """Carries a batch with its labels; the forward writes the loss and metrics of the student to it.

    The sum of the KL is divided by `n_tokens`, that of cross-entropies of labels by `n_labels`, and that of
    cross-entropies of all next tokens by `n_next`.
    """

    loss: torch.Tensor
    rows: RowMetrics  # of `queries`
    taught: torch.Tensor | None = None  # [N, H_t], the teacher's states

    def __init__(self, labelled: Labelled, n_tokens: int, n_labels: int, n_next: int) -> None:
        super().__init__(labelled.valid, labelled.ordinal)
        self.labelled, self.n_tokens, self.n_labels, self.n_next = labelled, n_tokens, n_labels, n_next
        # [N] indices among the flattened tokens
        self.queries = labelled.held(labelled.valid.flatten().nonzero().squeeze(1))
        self.labels = labelled.next_label.flatten()[self.queries]  # [N], -100 for none
        self.has_label = self.labels != IGNORE_INDEX


class NativeDistiller(Distiller):
    """Distils the predictions of a teacher into a student under its view, in one forward of the student.

    Args:
        model: the student, patched, bare or wrapped.
        targets: what counts.
        teacher: the same weights with adapters off, or a frozen copy; None for targets without a KL.
        offload: whether the teacher's hidden states wait on the CPU while the student runs.

    Raises:
        ValueError: without a cross-entropy, student and teacher have the same RoPE; or the head has an adapter.
    """

    def __init__(
        self,
        model: nn.Module,
        targets: NativeTargets,
        teacher: SharedTeacher | CopiedTeacher | None,
        *,
        offload: bool = False,
    ) -> None:
        self.targets, self.offload = targets, offload
        super().__init__(model, teacher)
        require(why_no_losses(self.causal_lm, self.decoder))

    def _require_difference(self) -> None:
        # with a cross-entropy, the KL to the initial model makes sense for any RoPE
        if not self.targets.has_ce:
            super()._require_difference()

    @property
    def reads_labels(self) -> bool:
        """Whether a forward computes cross-entropies."""
        return bool(self.targets.clm_weight) or self.reads_text or not self.decoder.training

    @property
    def reads_text(self) -> bool:
        """Whether a forward computes cross-entropies of all next tokens."""
        return bool(self.targets.text_weight)

    def check_length(self, length: int) -> None:
        """Raise ValueError if documents of `length` tokens exceed the teacher's context window."""
        if self.teacher is not None:
            self.require_taught_length("the teacher, the model as it was pretrained,", length)

    def before(self, request: NativeRequest, call: DecoderCall) -> None:
        if self.teacher is not None:
            self.check_length(int(request.labelled.documents.length.max()))
            taught = request.labelled.states(self._ask_teacher(request, call).last_hidden_state, request.queries)
            request.taught = taught.to("cpu") if self.offload else taught

    def after(self, request: NativeRequest, output: Any) -> None:
        taught, request.taught = request.taught, None
        hidden = request.labelled.states(output.last_hidden_state, request.queries)  # [N, H]
        labels, ce_weight = self._labels_and_weights(request)
        if taught is None:
            request.loss, request.rows = head_losses(self.causal_lm, hidden, None, labels, ce_weight, None)
            return
        kl_weight = torch.full_like(ce_weight, self.targets.weight / request.n_tokens)
        teacher = self.teacher.head, taught.to(hidden.device)
        del taught
        direction, temperature = self.targets.direction, self.targets.temperature
        if temperature == 1:  # both terms in one sweep over the vocabulary
            request.loss, request.rows = head_losses(
                self.causal_lm, hidden, hidden, labels, ce_weight, kl_weight, teacher, direction=direction
            )
            return
        # the temperature is for the KL alone, so the cross-entropy takes another sweep over the vocabulary
        ce, rows = head_losses(self.causal_lm, hidden, None, labels, ce_weight, None)
        kl, kl_rows = head_losses(
            self.causal_lm,
            hidden,
            hidden,
            torch.full_like(labels, IGNORE_INDEX),
            ce_weight,
            kl_weight,
            teacher,
            direction=direction,
            temperature=temperature,
        )
        request.loss, request.rows = ce + kl, replace(rows, kl=kl_rows.kl)

    def _labels_and_weights(self, request: NativeRequest) -> tuple[torch.Tensor, torch.Tensor]:
        """The label of each query, -100 for none, and the weight of its cross-entropy, both [N]."""
        labels, has_label = request.labels, request.has_label
        weight = has_label * (self.targets.clm_weight / request.n_labels)  # [N]
        if self.reads_text:
            next_token = request.labelled.next_token.flatten()[request.queries]  # [N]
            labels = torch.where(has_label, labels, next_token)
            weight = weight + (next_token != IGNORE_INDEX) * (self.targets.text_weight / request.n_next)
        elif not self.reads_labels:
            labels = torch.full_like(labels, IGNORE_INDEX)
        return labels, weight.float()
