"""Next-token loss with a weight for each token."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rope_kernels import RowMetrics
from rope_kernels.vocabulary.checks import IGNORE_INDEX

from ..families.capabilities import why_no_losses
from ..layout.labelled import Labelled
from .cue import CueWeight
from .forward_loss import DecoderCall, ForwardLoss, LossRequest, require
from .heads import head_losses
from .longce import LongCE, ShortContexts, head_weights


@dataclass(frozen=True)
class NextTokenLoss:
    """A loss with its parts, row by row.

    Args:
        loss: what is minimised, a scalar.
        rows: metrics of each row, detached, [N].
        queries: indices of the rows among the flattened tokens, [N].
        token_weight: factor of each row's cross-entropy, [N]; None if all are 1.
    """

    loss: torch.Tensor
    rows: RowMetrics
    queries: torch.Tensor
    token_weight: torch.Tensor | None


class NextTokenRequest(LossRequest):
    """Carries a batch with its labels into the forward, which writes the loss to it.

    Args:
        labelled: the batch.
        ce_divisor: what the sum of cross-entropies is divided by.
    """

    result: NextTokenLoss
    short = ShortContexts()

    def __init__(self, labelled: Labelled, ce_divisor: int) -> None:
        super().__init__(labelled.valid, labelled.ordinal)
        self.labelled, self.ce_divisor = labelled, ce_divisor


def next_token_loss(
    causal_lm: Any,
    labelled: Labelled,
    hidden: torch.Tensor,
    divisor: int,
    *,
    longce: LongCE | None = None,
    short_ce: torch.Tensor | None = None,
    cue: CueWeight | None = None,
    **options: Any,
) -> NextTokenLoss:
    """Loss = sum over labels of w CE / divisor, with w the product of LongCE's and the cue's weights.

    Args:
        causal_lm: the model, for its head.
        labelled: the batch.
        hidden: last hidden states, [batch, n, H].
        divisor: number of labels that the mean is over.
        longce: LongCE's weights, or None.
        short_ce: `LongCE.reference` of the batch, [batch, n]; None weighs all alike.
        cue: weight of the cue's tokens, or None.
        **options: of `rope_kernels.linear_ce_kl`.
    """
    labels = labelled.next_label.flatten()  # [batch n]
    queries = labelled.held((labels != IGNORE_INDEX).nonzero().squeeze(1))
    ce_weight = torch.full((len(queries),), 1 / divisor, device=labels.device)  # [N]
    cue_factor = None if cue is None else cue.factors(labelled).flatten()[queries]
    if cue_factor is not None:
        ce_weight = ce_weight * cue_factor
    longce_options = head_weights(longce, short_ce, queries)
    states = labelled.states(hidden, queries)  # [N, H]
    loss, rows = head_losses(causal_lm, states, None, labels[queries], ce_weight, None, **options, **longce_options)
    token_weight = rows.ce_factor if longce_options or cue is not None else None
    if token_weight is not None and cue_factor is not None:
        token_weight = token_weight * cue_factor
    return NextTokenLoss(loss, rows, queries, token_weight)


class WeightedNextToken(ForwardLoss):
    """Next-token loss with weights of tokens, under whatever view is in force. Evaluation weighs all alike.

    Args:
        model: patched, bare or wrapped.
        longce: LongCE's weights, or None.
        cue: EndPrompt's, or None.
    """

    def __init__(self, model: nn.Module, longce: LongCE | None, cue: CueWeight | None = None) -> None:
        super().__init__(model)
        require(why_no_losses(self.causal_lm, self.decoder))
        self.longce, self.cue = longce, cue

    def before(self, request: NextTokenRequest, call: DecoderCall) -> None:
        if self.decoder.training and self.longce is not None:
            request.short = ShortContexts(self.longce.reference(self.causal_lm, self.decoder, request.labelled))

    def after(self, request: NextTokenRequest, output: Any) -> None:
        request.result = next_token_loss(
            self.causal_lm,
            request.labelled,
            output.last_hidden_state,
            request.ce_divisor,
            longce=self.longce,
            short_ce=request.short.ce,
            cue=self.cue if self.decoder.training else None,
        )
