"""The losses of `in_loops` written out: plain passes over each document alone, and dense softmax maps.

They explain the formulas and are what tests compare with. Memory is that of all logits, and of maps of n x n numbers.
"""

from collections.abc import Iterable
from typing import Any

import torch

from ..families.attention_calls import AttentionCall, watched_attention
from ..patch import rope_view


def self_distillation_loss_ref(
    model: Any, documents: Iterable[tuple[torch.Tensor, torch.Tensor, torch.Tensor]], kl_weight: float = 1.0
) -> torch.Tensor:
    """`self_distillation_loss` of an optimizer step.

    Args:
        model: a causal LM.
        documents: token IDs [L], labels [L] (-100 for none) and RoPE indices of the view [L] of each document, in all
            of which some draw of the view changes a prediction.
        kl_weight: lambda.
    """
    ce, n_labels, kl, n_documents = torch.zeros(()), 0, torch.zeros(()), 0
    for ids, labels, rope_index in documents:
        with rope_view(model, "standard"):
            log_q = model(ids[None], use_cache=False).logits[0].log_softmax(-1)  # [L, vocabulary]
        with rope_view(model, index=rope_index[None]):
            log_p = model(ids[None], use_cache=False).logits[0].log_softmax(-1)  # [L, vocabulary]
        t = torch.arange(len(ids), device=ids.device)

        # query t predicts token t + 1; the last one predicts nothing
        queries = t[:-1][labels[1:] != -100]
        ce = ce - log_q[queries, labels[queries + 1]].sum()
        n_labels += len(queries)

        # s, the first token that the view moves away from the first one
        moved = t[rope_index - rope_index[0] != t]
        s = int(moved[0]) if len(moved) else len(ids)
        q = log_q[queries[queries >= s]].detach()  # the target is held fixed
        p = log_p[queries[queries >= s]]
        # tokens from s on with a label; nobody predicts the first token, which counts if the second has a label
        counted = labels != -100
        counted[0] |= counted[1]
        kl = kl + (p.exp() * (p - q)).sum() / max(1, int(counted[s:].sum()))
        n_documents += 1
    return ce / n_labels + kl_weight * kl / n_documents


def relation_loss_ref(student: Any, teacher: Any, documents: Iterable[torch.Tensor]) -> torch.Tensor:
    """`relation_loss` of an optimizer step.

    Args:
        student: a causal LM.
        teacher: another.
        documents: token IDs [n] of each document.
    """
    total, n_tokens = torch.zeros(()), 0
    for ids in documents:
        of_student, of_teacher = _attention_calls(student, ids), _attention_calls(teacher, ids)
        for mine, other in zip(of_student, of_teacher, strict=True):  # layer by layer
            for name in ("query", "key", "value"):
                log_r = _log_relation(getattr(mine, name))  # [heads, n, n]
                log_target = _log_relation(getattr(other, name)).detach()
                kl = (log_target.exp() * (log_target - log_r)).sum(-1)  # KL(R_teacher || R_student), [heads, n]
                total = total + kl.sum() / (len(log_r) * len(of_student))
        n_tokens += len(ids)
    return total / n_tokens


def _log_relation(x: torch.Tensor) -> torch.Tensor:
    """Logarithm of softmax(X X^T / sqrt(head_dim)) over the tokens up to each, [heads, n, n], of X [1, heads, n, d]."""
    scores = x[0] @ x[0].transpose(-1, -2) / x.shape[-1] ** 0.5
    behind = torch.ones_like(scores[0], dtype=torch.bool).triu(1)
    # large, not infinite: the difference of two infinite ones is nan
    return scores.masked_fill(behind, torch.finfo(scores.dtype).min / 2).log_softmax(-1)


def _attention_calls(model: Any, ids: torch.Tensor) -> list[AttentionCall]:
    """The queries, keys and values of each layer, as attention gets them."""
    calls: list[AttentionCall] = []
    with watched_attention(model, calls.append):
        model(ids[None], use_cache=False)
    return calls
