"""objective="native-distill": keep the predictions of the pretrained model under a view."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rope_patch.layout.labelled import Labelled
from rope_patch.losses import NativeDistiller, NativeRequest, NativeTargets

from .base import OBJECTIVES, Objective, ObjectiveOptions
from .step_means import Part


@dataclass(frozen=True, kw_only=True)
class NativeOptions(NativeTargets, ObjectiveOptions):
    """Options of "native-distill"."""

    @property
    def needs_teacher(self) -> bool:
        return bool(self.weight)

    @property
    def counts_every_token(self) -> bool:
        return bool(self.weight or self.text_weight)


@OBJECTIVES.register("native-distill")
class NativeObjective(Objective):
    """KL of the model under its view to the model as it was pretrained at true positions, and a cross-entropy beside.

    loss = weight (sum over tokens of KL) / tokens of the step + clm_weight (sum of cross-entropies) / labels of the
    step + text_weight (sum of cross-entropies) / next tokens of the step. Evaluation has the same at true positions.
    What is logged as `kl`, `ce` and `text_ce` makes up the loss, in evaluation too: a batch may have no label.

    When: Take it to keep what a model can do while its window grows.

    Source: ours, see `rope_patch.losses.NativeTargets`.
    """

    help = "distils predictions of the model as it was pretrained into the sampled view"
    shares_sequences = True
    options_class = NativeOptions
    options: NativeOptions
    forward_loss: NativeDistiller

    def _make_loss(self, model: nn.Module) -> NativeDistiller:
        teacher = self._native(model) if self.options.needs_teacher else None
        return NativeDistiller(model, self.options, teacher, offload=self.args.teacher_offload)

    def check_length(self, length: int) -> None:
        self.forward_loss.check_length(length)

    def read(self, batch: dict[str, Any]) -> Labelled:
        """Labels and documents."""
        return Labelled.of(batch, self.shard)

    def counts(self, read: Labelled) -> dict[str, int]:
        """Real tokens, queries with a label, and queries with a next token; the last two may be 0."""
        return {"tokens": int(read.valid.sum()), "labelled": read.n_labels, "next": read.n_next}  # of kl, ce, text_ce

    def evaluation_loss(self, means: dict[str, float]) -> float | None:
        """The means of KL and cross-entropies, weighed; 0 where an evaluation has nothing that counts, as TRL's.

        A mean over batches' losses would count the cross-entropy of a batch without labels as 0.
        """
        options = self.options
        weights = {"kl": options.weight, "ce": options.clm_weight, "text_ce": options.text_weight}
        return sum((weight * means[name] for name, weight in weights.items() if weight and name in means), 0.0)

    def _request(self, inputs: dict[str, Any], read: Labelled, counts: dict[str, int]) -> NativeRequest:
        return NativeRequest(read, counts["tokens"], counts["labelled"], counts["next"])

    def _combine(
        self, request: NativeRequest, counts: dict[str, int], batch_counts: dict[str, int]
    ) -> tuple[torch.Tensor, dict[str, Part]]:
        rows = request.rows  # each value [N], of the N real tokens
        parts: dict[str, Part] = {}
        if self.options.needs_teacher:
            parts["kl"] = rows.kl.double().sum(), batch_counts["tokens"]
        if self.forward_loss.reads_labels:
            sums = {"ce": rows.ce, "entropy": rows.entropy, "mean_token_accuracy": rows.is_top1}
            # [N]; with text_weight, tokens without a label have values as well, which are not those of labels
            label_values = {name: values.double().masked_fill(~request.has_label, 0) for name, values in sums.items()}
            parts |= {name: (values.sum(), batch_counts["labelled"]) for name, values in label_values.items()}
        if self.forward_loss.reads_text:
            parts["text_ce"] = rows.ce.double().sum(), batch_counts["next"]
        return request.loss, parts
