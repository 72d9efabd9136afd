"""Attention distance and entropy, recomputed from q and k for chosen queries, without an n x n map."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Self

import torch
from torch import nn

from ...attention.plain import last_hidden_states
from ...families.attention_calls import AttentionCall, attention_name
from ...families.capabilities import computes_own_attention
from ...rope.rotary import find_causal_lm, find_decoder, rotary_owners
from ..results.figures import Figure, add_legend, compact, draw_bars, line_figure, new_figure
from ..results.progress import token_bar
from ..results.result import Result
from .base import Measure
from .subject import Subject

Visit = Callable[[int, torch.Tensor, torch.Tensor], None]
"""Called with the attention of one GQA group: layer index; softmax over keys, float32 [group size, n_queries, seq_len];
and share of attention that goes to keys, float32 [group size, n_queries, 1], which is 1 without an attention sink."""

# names of modules that compress the keys of a layer, or choose the keys that each query sees
_CHOOSES_KEYS = ("indexer", "compressor")

LAST = 256
"""Default number of queries at the end of a row, as in RPSD."""


@dataclass(frozen=True)
class AttentionDistance(Result):
    """How far back the last queries look, by layer.

    Args:
        seq_len: tokens in a row.
        last: number of queries, at the end of each row.
        threshold: weights above it count in `count`.
        edges: edges of the bins, in tokens of distance: query index minus key index.
        count: [n_layers][n_bins], number of weights above the threshold, per query and head.
        mass: [n_layers][n_bins], attention weight, per query and head. A layer sums to 1, or less if attention sinks
            take a share, as in gpt-oss.
        n_rows: number of rows in the means.
    """

    title: ClassVar[str] = "Attention distance"
    column: ClassVar[str] = "mass"

    seq_len: int
    last: int
    threshold: float
    edges: list[int]
    count: list[list[float]]
    mass: list[list[float]]
    n_rows: int

    @property
    def far(self) -> int:
        """Distance from which the headline counts, in tokens: the last edge within a quarter of the row."""
        return max((e for e in self.edges[:-1] if e <= self.seq_len // 4), default=0)

    def headline(self) -> dict[str, float]:
        return {f"attention at least {self.far} tokens back": self.mean_mass(self.far)}

    def table(self) -> list[dict[str, Any]]:
        return [
            {"layer": layer, "first": a, "end": b, "mass": self.mass[layer][k], "count": self.count[layer][k]}
            for layer in range(len(self.mass))
            for k, (a, b) in enumerate(pairwise(self.edges))
        ]

    def mean_mass(self, beyond: int = 0) -> float:
        """Share of attention to keys at least `beyond` tokens back, mean over layers; `beyond` is one of `edges`."""
        first = self.edges.index(beyond)
        return sum(sum(layer[first:]) for layer in self.mass) / len(self.mass)

    @classmethod
    def figure(cls, results: Mapping[str, Self]) -> Figure:
        figure, (left, right) = new_figure(2, share_y=False)
        first = next(iter(results.values()))
        groups = [compact(a) for a in first.edges[:-1]]
        for axes, name, label in (
            (left, "mass", "attention weight"),
            (right, "count", f"weights above {first.threshold:g} per query"),
        ):
            means = {k: [sum(c) / len(c) for c in zip(*getattr(r, name), strict=True)] for k, r in results.items()}
            draw_bars(axes, groups, means)
            axes.tick_params(axis="x", labelsize=9, rotation=60)  # rows of 131072 tokens have 18 bars
            axes.set(xlabel="distance (tokens), its lower end", ylabel=label)
        figure.suptitle(f"last {first.last} queries of {first.seq_len} tokens, mean over layers and heads")
        add_legend(figure, left)
        return figure

    @classmethod
    def readings(cls, results: Mapping[str, Self]) -> list[str]:
        far = next(iter(results.values())).far
        sentences = [
            f"{label}: {100 * r.mean_mass(far):.1f} % of the attention goes at least {far} tokens back."
            for label, r in results.items()
        ]
        return [
            *sentences,
            "Untrained positions far back draw attention whatever token is there, so a lower share is not worse.",
        ]


@dataclass(frozen=True)
class EntropyRatio(Result):
    """Mean entropy of attention rows of queries beyond the window, over that of queries within it.

    Weights are normalised over keys, without the share of attention sinks.

    Args:
        window: positions that separate queries within from queries beyond.
        inside: mean row entropy of queries within the window, in nats, over layers, heads and rows.
        beyond: mean row entropy of queries beyond the window.
        inside_share: mean of entropy / ln(visible keys) within the window, since entropy grows with the number of keys.
        beyond_share: mean of entropy / ln(visible keys) beyond the window.
        by_layer: [n_layers], ratio of each layer.
        n_rows: number of rows in the means.
    """

    title: ClassVar[str] = "Attention entropy"
    column: ClassVar[str] = "entropy_ratio"

    window: int
    inside: float
    beyond: float
    inside_share: float
    beyond_share: float
    by_layer: list[float]
    n_rows: int

    @property
    def ratio(self) -> float:
        """`beyond` / `inside`."""
        return self.beyond / self.inside

    def headline(self) -> dict[str, float]:
        return {"attention entropy ratio": self.ratio}

    def table(self) -> list[dict[str, Any]]:
        return [{"layer": layer, "entropy_ratio": ratio} for layer, ratio in enumerate(self.by_layer)]

    @classmethod
    def figure(cls, results: Mapping[str, Self]) -> Figure:
        figure, axes = line_figure(
            {label: (range(len(r.by_layer)), r.by_layer) for label, r in results.items()},
            marker="o",
            title="attention entropy, beyond the window over within",
            xlabel="layer",
            ylabel="ratio",
        )
        axes.axhline(1, color="0.4", linewidth=1)
        axes.xaxis.get_major_locator().set_params(integer=True)
        return figure

    @classmethod
    def readings(cls, results: Mapping[str, Self]) -> list[str]:
        sentences = [
            f"{label}: {r.inside:.2f} nats within the window and {r.beyond:.2f} beyond it, a ratio of {r.ratio:.3f}. "
            f"That is {r.inside_share:.2f} and {r.beyond_share:.2f} of the maximum."
            for label, r in results.items()
        ]
        return [*sentences, "A ratio far above 1 means that attention blurs beyond the window."]


def attention_distance(
    model: nn.Module, rows: torch.Tensor, *, last: int = LAST, threshold: float = 1e-3, progress: bool = True
) -> AttentionDistance:
    """Histogram of query index minus key index over the attention of the last queries of each row.

    The weight of key j for query i is exp(s_ij) / (exp(b) + sum_k exp(s_ik)), with b the head's attention sink; without
    a sink, exp(b) is 0.

    Args:
        model: a causal LM with sdpa or eager attention, with attention sinks or without.
        rows: token ids, int64 [n_rows, n].
        last: number of queries, from the end of a row.
        threshold: weights above it are counted; all weights are summed.
        progress: whether to show a bar.

    Raises:
        ValueError: more queries than tokens, or attention that cannot be recomputed from q and k.

    Source: RPSD, arXiv:2604.14339, attention-distance histogram: 256 queries, weights above 1e-3.
    """
    subject = Subject(model)
    subject.check_rows(rows)
    seq_len = rows.shape[1]
    if not 1 <= last <= seq_len:
        raise ValueError(f"last must be in 1..{seq_len}, got {last}.")
    # bins of distances 0, 1, 2..3, 4..7, 8..15, ...
    edges = [0, *(2**k for k in range(20) if 2**k < seq_len), seq_len]
    queries = torch.arange(seq_len - last, seq_len)  # [last]
    # distances edges[k] <= i - j < edges[k + 1] are the consecutive keys i - edges[k + 1] < j <= i - edges[k]
    ends = (queries[:, None] - torch.tensor(edges) + 1).clamp(0, seq_len).to(subject.device)  # [last, n_bins + 1]
    count: dict[int, torch.Tensor] = {}
    mass: dict[int, torch.Tensor] = {}  # by layer, float64 [n_bins], and so is count
    heads: dict[int, int] = {}

    def visit(layer: int, over_keys: torch.Tensor, to_keys: torch.Tensor) -> None:
        for weights in over_keys * to_keys:  # [last, seq_len], one head at a time: the cumulative sums are float64
            mass[layer] = mass.get(layer, 0) + _bin_sums(weights, ends)
            count[layer] = count.get(layer, 0) + _bin_sums(weights > threshold, ends)
        heads[layer] = heads.get(layer, 0) + over_keys.shape[0]

    _read(subject, rows, queries, visit, "attention distance", progress)
    layers = sorted(mass)
    return AttentionDistance(
        seq_len,
        last,
        threshold,
        edges,
        [(count[i] / (heads[i] * last)).tolist() for i in layers],
        [(mass[i] / (heads[i] * last)).tolist() for i in layers],
        len(rows),
    )


def entropy_ratio(
    model: nn.Module, rows: torch.Tensor, *, window: int | None = None, n_queries: int = 64, progress: bool = True
) -> EntropyRatio:
    """H(beyond) / H(within): mean entropy of the attention rows of queries beyond and within the window.

    H = -sum_j p_j ln p_j, in nats, with p the softmax over keys, without the share of an attention sink.

    Args:
        model: a causal LM with sdpa or eager attention, with attention sinks or without.
        rows: token ids, int64 [n_rows, n], n > window.
        window: in positions; None means the trained window.
        n_queries: queries on each side, evenly spread over positions 64..window and window+1..n-1.
        progress: whether to show a bar.

    Raises:
        ValueError: rows that do not reach beyond the window, or attention that cannot be recomputed from q and k.

    Source: PosAug, FoGen 2026, attention entropy ratio.
    """
    subject = Subject(model)
    window = subject.trained_window if window is None else window
    if window is None:
        raise ValueError("the model's config names no trained window: pass window, in positions.")
    subject.check_rows(rows, at_least=window + 2)
    first = min(64, window // 2)  # with few keys the entropy of any model is low
    inside = torch.linspace(first, window, n_queries).long()
    beyond = torch.linspace(window + 1, rows.shape[1] - 1, n_queries).long()
    queries = torch.cat([inside, beyond])
    visible = (queries + 1).double().log().to(subject.device)  # [2 * n_queries], ln of the number of keys
    sums: dict[int, torch.Tensor] = {}  # by layer, float64 [2, 2 * n_queries]
    heads: dict[int, int] = {}

    def visit(layer: int, over_keys: torch.Tensor, to_keys: torch.Tensor) -> None:
        entropy = -torch.special.xlogy(over_keys, over_keys).sum(-1).double().sum(0)  # [2 * n_queries]
        sums[layer] = sums.get(layer, 0) + torch.stack([entropy, entropy / visible])
        heads[layer] = heads.get(layer, 0) + over_keys.shape[0]

    _read(subject, rows, queries, visit, "attention entropy", progress)
    # [n_layers, 2 (entropy, share), 2 (within, beyond)]
    means = torch.stack([(sums[i] / heads[i]).view(2, 2, n_queries).mean(-1) for i in sorted(sums)]).cpu()
    (inside_mean, beyond_mean), (inside_share, beyond_share) = means.mean(0).tolist()
    by_layer = (means[:, 0, 1] / means[:, 0, 0]).tolist()
    return EntropyRatio(window, inside_mean, beyond_mean, inside_share, beyond_share, by_layer, len(rows))


def _bin_sums(values: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Sums of values [m, n] over keys ends[:, k + 1] .. ends[:, k] - 1 and over queries; float64 [n_bins]."""
    sums = torch.nn.functional.pad(values.cumsum(-1, dtype=torch.float64), (1, 0)).gather(-1, ends)
    return (sums[:, :-1] - sums[:, 1:]).sum(0)


def _read(
    subject: Subject, rows: torch.Tensor, queries: torch.Tensor, visit: Visit, title: str, progress: bool
) -> None:
    """Call `visit` with the attention of `queries` in every layer, one GQA group at a time."""
    require_recomputable_attention(subject.causal_lm)
    queries = queries.to(subject.device)
    with subject.evaluating(), token_bar(subject.model, rows.numel(), title, show=progress) as done:
        for k, row in enumerate(rows, 1):
            ids = row[None].to(subject.device)
            last_hidden_states(subject.causal_lm, ids, lambda call: _visit_groups(call, queries, visit))
            done(k * rows.shape[1])


def require_recomputable_attention(model: nn.Module) -> None:
    """Raise ValueError if the attention of a model, with or without its weights, cannot be recomputed from q and k."""
    causal_lm: Any = find_causal_lm(model)
    name = attention_name(causal_lm)
    if name not in ("sdpa", "eager"):
        raise ValueError(
            f"attention can be recomputed for sdpa and eager only, and the model uses {name!r}: load it with sdpa."
        )
    chooses = next((n for n, _ in causal_lm.named_modules() if n.rpartition(".")[2] in _CHOOSES_KEYS), None)
    if chooses is not None:
        why = f"chooses or compresses the keys that its queries see ({chooses}), which q and k alone do not show"
    elif len(owners := rotary_owners(causal_lm)) > 1:
        names = ", ".join(sorted(type(owner).__name__ for owner in owners))
        why = f"has several transformers ({names}) over different sequences, whose distances are not in tokens"
    elif computes_own_attention(find_decoder(causal_lm)):
        why = "computes attention without Transformers' attention functions, so q and k cannot be read"
    else:
        return
    raise ValueError(
        f"{type(causal_lm).__name__} {why}: its attention cannot be measured. Leave the measures attention and entropy "
        "out: `rope-patch eval` runs those that are named, e.g. --cliff --gain --passkey --niah."
    )


def _visit_groups(call: AttentionCall, queries: torch.Tensor, visit: Visit) -> None:
    """Call `visit` with the attention of `queries` over the keys of one row, in float32."""
    query, key, options = call.query, call.key, call.options  # [1, n_heads, n, head_dim], [1, n_kv_heads, n, head_dim]
    sinks = options.get("s_aux")  # [n_heads], an extra logit in the softmax of each head
    distance = queries[:, None] - torch.arange(key.shape[2], device=key.device)  # [n_queries, n]
    hidden = distance < 0  # later keys
    if options.get("sliding_window"):
        hidden |= distance >= options["sliding_window"]
    mask = call.mask  # [1, 1 or n_heads, n, n]; some families, e.g. Phi-MoE, apply a sliding window by the mask alone
    bias = None
    if isinstance(mask, torch.Tensor):
        mask = mask[0, :, queries]
        bias = torch.where(mask, 0.0, -torch.inf) if mask.dtype == torch.bool else mask.float()
        bias = bias.expand(query.shape[1], -1, -1)  # [n_heads, n_queries, n]
    group = query.shape[1] // key.shape[1]
    chosen = (
        query[0, :, queries].float().unflatten(0, (key.shape[1], group))
    )  # [n_kv_heads, group, n_queries, head_dim]
    for head in range(key.shape[1]):
        scores = call.scale * chosen[head] @ key[0, head].float().T  # [group, n_queries, n]
        if options.get("softcap"):
            scores = options["softcap"] * torch.tanh(scores / options["softcap"])
        if bias is not None:
            scores = scores + bias[head * group : (head + 1) * group]
        scores = scores.masked_fill(hidden, -torch.inf)
        to_keys = torch.ones_like(scores[..., :1])
        if sinks is not None:
            group_sinks = sinks.float()[head * group : (head + 1) * group, None, None]
            # sum_k exp(s_k) / (exp(b) + sum_k exp(s_k))
            to_keys = (scores.logsumexp(-1, keepdim=True) - group_sinks).sigmoid()
        visit(call.module.layer_idx, scores.softmax(-1), to_keys)


ATTENTION = Measure(
    name="attention",
    result=AttentionDistance,
    run=lambda job: attention_distance(job.model, job.rows),
    help="how far back the last tokens look, and how spread out attention is beyond the window",
    by_default=True,
    reads_rows=True,
    least=lambda window: LAST,
    check_model=require_recomputable_attention,
)
ENTROPY = Measure(
    name="entropy",
    result=EntropyRatio,
    run=lambda job: entropy_ratio(job.model, job.rows, window=job.window),
    flag="attention",
    by_default=True,
    reads_rows=True,
    settings=("window",),
    least=lambda window: 0 if window is None else window + 2,
    check_model=require_recomputable_attention,
)
