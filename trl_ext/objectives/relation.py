"""objective="relation-distill": LinearARD."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rope_patch.base import papers
from rope_patch.layout.labelled import document_of_tokens
from rope_patch.losses import LogitKL, RelationDistiller, RelationTargets

from .base import OBJECTIVES, ActivationFactors, Objective, ObjectiveOptions
from .step_means import Part


@dataclass(frozen=True, kw_only=True)
class RelationOptions(RelationTargets, ObjectiveOptions):
    """Options of "relation-distill".

    Args:
        logit_kl: a KL of next-token distributions beside the relations, e.g. `{"weight": 0.1}`; None leaves it out.
    """

    logit_kl: LogitKL | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alike_from_the_start and not (self.logit_kl is not None and self.logit_kl.weight):
            raise ValueError(
                "teacher and student have the same first layer without RoPE, so there is nothing to distil: "
                "name more layers, or take rope='post' with q or k."
            )

    @property
    def needs_teacher(self) -> bool:
        return True

    def activation_factors(self, config: Any, moved: float = 1.0, *, shared: bool = False) -> ActivationFactors:
        # the teacher's queries, keys and values of all layers, which are about as wide as 1.5 states
        n_layers = config.num_hidden_layers if self.layers is None else len(self.layers)
        queries = config.num_attention_heads
        keys = getattr(config, "num_key_value_heads", None) or queries
        heads = sum(keys if name in ("k", "v") else queries for name in self.weights)
        # what the forward of the KL found, in float32: the KL of a row of each head's map, and four sums of it
        return ActivationFactors(beside=1.5 * n_layers, kept=4 * 5 * heads * n_layers)

    def cited(self) -> tuple[str, ...]:
        return (papers.LINEAR_ARD,)

    def record(self) -> dict[str, Any]:
        # a logit KL of weight 0 is only logged
        trained = self.logit_kl if self.logit_kl is not None and self.logit_kl.weight else None
        return {**super().record(), "logit_kl": trained}


@OBJECTIVES.register("relation-distill")
class RelationObjective(Objective):
    """Relations of the model as it was pretrained, distilled into the rescaled one.

    loss = sum_X weight_X (sum over layers, heads and tokens of KL) / (layers * heads * tokens of the step), and beside
    it the logit KL's weight times its mean over the tokens that it counts; with weight 0 that is logged alone.

    When: Take it to bring back what a rescaling broke, before training on long rows.

    Source: LinearARD, arXiv:2604.00004.
    """

    help = "distils relations of the model as it was pretrained into the rescaled one"
    synonyms = ("linearard",)
    shares_sequences = True
    options_class = RelationOptions
    options: RelationOptions
    forward_loss: RelationDistiller

    def _make_loss(self, model: nn.Module) -> RelationDistiller:
        options, offload = self.options, self.args.teacher_offload
        return RelationDistiller(model, options, self._native(model), logit_kl=options.logit_kl, offload=offload)

    def check_length(self, length: int) -> None:
        self._warn_beyond_window(length)

    def read(self, batch: dict[str, Any]) -> torch.Tensor:
        """The document of each token, int64 [batch, n], -1 on padding."""
        return document_of_tokens(batch["input_ids"], batch.get("attention_mask"), batch.get("position_ids"))

    def counts(self, read: torch.Tensor) -> dict[str, int]:
        """Real tokens, and those that the logit KL counts."""
        counts = super().counts(read >= 0)  # padding is -1
        if self.options.logit_kl is not None:
            counts["last"] = int(self.options.logit_kl.last_tokens(read).sum())
        return counts

    def _combine(
        self, request: Any, counts: dict[str, int], batch_counts: dict[str, int]
    ) -> tuple[torch.Tensor, dict[str, Part]]:
        sums = {name: request.loss(name) for name in self.options.weights}  # over tokens; over layers and heads means
        # one division of the sum, as all relations are counted over the same tokens
        loss = torch.stack([weight * sums[name] for name, weight in self.options.weights.items()]).sum()
        loss = loss / counts["tokens"]
        parts: dict[str, Part] = {name: (total, batch_counts["tokens"]) for name, total in sums.items()}
        if self.options.logit_kl is not None:
            if self.options.logit_kl.weight:
                loss = loss + self.options.logit_kl.weight * request.logit_kl / counts["last"]
            parts["logit_kl"] = (request.logit_kl, batch_counts["last"])
        return loss, {f"relation/{name}": value for name, value in parts.items()}
