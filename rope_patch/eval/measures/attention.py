"""Where the last tokens look, recomputed from queries and keys: never an n x n map."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import nn

from ...attention.plain import last_hidden_states
from ...families.attention_calls import AttentionCall, attention_name
from ...families.capabilities import computes_own_attention
from ...rope.rotary import find_causal_lm, find_decoder, rotary_owners
from ..results.progress import token_bar
from ..results.result import Result
from .base import Measure
from .subject import Subject

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# (layer index, softmax over keys [n_heads of one group, n_queries, seq_len] float32, the share of attention that goes
# to keys [n_heads of one group, n_queries, 1] float32, which is 1 without an attention sink)
Visit = Callable[[int, torch.Tensor, torch.Tensor], None]

# modules that give a layer other keys than those of its tokens, or let each query see some of them only
_CHOOSES_KEYS = ("indexer", "compressor")

LAST = 256
"""Queries at the end of a row whose distances are counted where no number is named: RPSD's."""


@dataclass(frozen=True)
class AttentionDistance(Result):
    """How far back the last queries look, by layer.

    Args:
        seq_len: tokens in a row.
        last: queries counted, at the end of each row.
        threshold: weights above this count in `count`.
        edges: distances, query index minus key index, between which `count` and `mass` are summed.
        count: [n_layers][n_bins], weights above the threshold, per query and head.
        mass: [n_layers][n_bins], attention weight, per query and head; a layer's sum is 1, or less by what its
            attention sinks take, as in gpt-oss.
        n_rows: rows that the means are over.
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
        """The last edge within a quarter of the row, in tokens: what the headline counts from."""
        return max((e for e in self.edges[:-1] if e <= self.seq_len // 4), default=0)

    def headline(self) -> dict[str, float]:
        return {f"attention at least {self.far} tokens back": self.mean_mass(self.far)}

    def table(self) -> list[dict[str, Any]]:
        return [
            {"layer": layer, "first": a, "end": b, "count": self.count[layer][k], "mass": self.mass[layer][k]}
            for layer in range(len(self.mass))
            for k, (a, b) in enumerate(pairwise(self.edges))
        ]

    def mean_mass(self, beyond: int = 0) -> float:
        """Share of attention that goes to keys at least `beyond` tokens back, mean over layers; `beyond` an edge."""
        first = self.edges.index(beyond)
        return sum(sum(layer[first:]) for layer in self.mass) / len(self.mass)

    @classmethod
    def figure(cls, results: Mapping[str, Self]) -> "Figure":
        from ..results.figures import add_legend, compact, draw_bars, new_figure

        figure, (left, right) = new_figure(2, share_y=False)
        first = next(iter(results.values()))
        groups = [compact(a) for a in first.edges[:-1]]
        for axes, name, label in (
            (left, "mass", "attention weight"),
            (right, "count", f"weights above {first.threshold:g} per query"),
        ):
            means = {k: [sum(c) / len(c) for c in zip(*getattr(r, name), strict=True)] for k, r in results.items()}
            draw_bars(axes, groups, means)
            axes.tick_params(axis="x", labelsize=9, rotation=60)  # of 18 bars in rows of 131072
            axes.set(xlabel="distance (tokens), its lower end", ylabel=label)
        figure.suptitle(f"last {first.last} queries of {first.seq_len} tokens, mean over layers and heads")
        add_legend(figure, left)
        return figure

    @classmethod
    def readings(cls, results: Mapping[str, Self]) -> list[str]:
        far = next(iter(results.values())).far
        said = [
            f"{label}: {100 * r.mean_mass(far):.1f} % of the attention goes at least {far} tokens back."
            for label, r in results.items()
        ]
        return [*said, "Far positions that were never trained draw attention whatever stands there: less is not worse."]


@dataclass(frozen=True)
class EntropyRatio(Result):
    """Row entropy of attention beyond the window over that within it.

    Of what goes to keys: where heads have attention sinks, as in gpt-oss, weights count as multiples of their sum.

    Args:
        window: positions on either side of which entropies are compared.
        inside: mean row entropy of queries within it, in nats, over layers, heads and rows.
        beyond: the same of queries beyond it.
        inside_share: mean of entropy / ln(visible keys) within it: entropy grows with what is visible anyway.
        beyond_share: the same beyond it.
        by_layer: [n_layers], ratio of each layer.
        n_rows: rows that the means are over.
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
        """Ratio of `beyond` to `inside`."""
        return self.beyond / self.inside

    def headline(self) -> dict[str, float]:
        return {"attention entropy ratio": self.ratio}

    def table(self) -> list[dict[str, Any]]:
        return [{"layer": layer, "entropy_ratio": ratio} for layer, ratio in enumerate(self.by_layer)]

    @classmethod
    def figure(cls, results: Mapping[str, Self]) -> "Figure":
        from ..results.figures import add_legend, new_figure

        figure, (axes,) = new_figure()
        for label, result in results.items():
            axes.plot(result.by_layer, marker="o", markersize=3, label=label)
        axes.axhline(1, color="0.4", linewidth=1)
        axes.set(title="attention entropy, beyond the window over within", xlabel="layer", ylabel="ratio")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.25)
        add_legend(figure, axes)
        return figure

    @classmethod
    def readings(cls, results: Mapping[str, Self]) -> list[str]:
        said = [
            f"{label}: {r.inside:.2f} nats within the window, {r.beyond:.2f} beyond, a ratio of {r.ratio:.3f} "
            f"({r.inside_share:.2f} and {r.beyond_share:.2f} of the most possible)."
            for label, r in results.items()
        ]
        return [*said, "A ratio far above 1 means that attention blurs beyond the window."]


def attention_distance(
    model: nn.Module, rows: torch.Tensor, *, last: int = LAST, threshold: float = 1e-3, progress: bool = True
) -> AttentionDistance:
    """Histogram of query index minus key index over the attention of the last queries of each row.

    The weight of key j for query i is exp(s_ij) / (exp(b) + sum_k exp(s_ik)), with b the head's attention sink; exp(b)
    is 0 where it has none.

    Args:
        model: a causal LM on sdpa or eager attention, with attention sinks or without.
        rows: token ids, int64 [n_rows, n].
        last: queries from the end.
        threshold: weights above it are counted; the weight itself is summed as well.
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
    edges = [0, *(2**k for k in range(20) if 2**k < seq_len), seq_len]
    queries = torch.arange(seq_len - last, seq_len)
    # distances edges[k] <= i - j < edges[k + 1] are keys i - edges[k + 1] < j <= i - edges[k], a run of them
    ends = (queries[:, None] - torch.tensor(edges) + 1).clamp(0, seq_len).to(subject.device)
    count: dict[int, torch.Tensor] = {}
    mass: dict[int, torch.Tensor] = {}
    heads: dict[int, int] = {}

    def visit(layer: int, over_keys: torch.Tensor, to_keys: torch.Tensor) -> None:
        for of_head in over_keys * to_keys:  # one head at a time: sums from the left are in float64
            mass[layer] = mass.get(layer, 0) + _run_sums(of_head, ends)
            count[layer] = count.get(layer, 0) + _run_sums(of_head > threshold, ends)
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
    """H(beyond) / H(within): mean entropy of attention rows of queries beyond the window over that of those within.

    H = -sum_j p_j ln p_j, in nats, with p the softmax over keys: what an attention sink takes is left out.

    Args:
        model: a causal LM on sdpa or eager attention, with attention sinks or without.
        rows: token ids, int64 [n_rows, n], n > window.
        window: None means the trained one.
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
    first = min(64, window // 2)
    inside = torch.linspace(first, window, n_queries).long()
    beyond = torch.linspace(window + 1, rows.shape[1] - 1, n_queries).long()
    queries = torch.cat([inside, beyond])
    visible = (queries + 1).double().log().to(subject.device)
    sums: dict[int, torch.Tensor] = {}
    heads: dict[int, int] = {}

    def visit(layer: int, over_keys: torch.Tensor, to_keys: torch.Tensor) -> None:
        entropy = -torch.special.xlogy(over_keys, over_keys).sum(-1).double()
        entropy = entropy.sum(0)
        sums[layer] = sums.get(layer, 0) + torch.stack([entropy, entropy / visible])
        heads[layer] = heads.get(layer, 0) + over_keys.shape[0]

    _read(subject, rows, queries, visit, "attention entropy", progress)
    # [n_layers, entropy or share, within or beyond]
    means = torch.stack([(sums[i] / heads[i]).view(2, 2, n_queries).mean(-1) for i in sorted(sums)]).cpu()
    (inside_mean, beyond_mean), (inside_share, beyond_share) = means.mean(0).tolist()
    by_layer = (means[:, 0, 1] / means[:, 0, 0]).tolist()
    return EntropyRatio(window, inside_mean, beyond_mean, inside_share, beyond_share, by_layer, len(rows))


def _run_sums(values: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Sums of values [m, n] over keys ends[:, k + 1] .. ends[:, k] - 1, then over rows; float64 [n_bins]."""
    sums = torch.nn.functional.pad(values.cumsum(-1, dtype=torch.float64), (1, 0)).gather(-1, ends)
    return (sums[:, :-1] - sums[:, 1:]).sum(0)


def _read(
    subject: Subject, rows: torch.Tensor, queries: torch.Tensor, visit: Visit, title: str, progress: bool
) -> None:
    """Call `visit` with the attention of `queries` in every layer, one group of heads at a time."""
    require_recomputable_attention(subject.causal_lm)
    queries = queries.to(subject.device)

    def watch(call: AttentionCall) -> None:
        _visit_groups(call, queries, visit)

    with (
        subject.evaluating(),
        token_bar(subject.model, rows.numel(), title, show=progress) as done,
    ):
        for k, row in enumerate(rows, 1):
            last_hidden_states(subject.causal_lm, row[None].to(subject.device), watch)
            done(k * rows.shape[1])


def require_recomputable_attention(model: nn.Module) -> None:
    """Raise what `attention_distance` and `entropy_ratio` would raise for the kind of a model's attention.

    Args:
        model: a causal LM, with its weights or without.

    Raises:
        ValueError: another attention implementation than sdpa and eager, layers whose queries do not see the keys of
            all tokens before them, several transformers over sequences of their own, or attention that is not called
            as Transformers' functions are.
    """
    causal_lm: Any = find_causal_lm(model)
    name = attention_name(causal_lm)
    if name not in ("sdpa", "eager"):
        raise ValueError(
            f"attention is recomputed from sdpa and eager only, the model runs {name!r}: load it with sdpa."
        )
    chooses = next((n for n, _ in causal_lm.named_modules() if n.rpartition(".")[2] in _CHOOSES_KEYS), None)
    if chooses is not None:
        why = f"chooses or compresses the keys that its queries see ({chooses}), which q and k alone do not give"
    elif len(owners := rotary_owners(causal_lm)) > 1:
        names = ", ".join(sorted(type(owner).__name__ for owner in owners))
        why = f"has several transformers ({names}) over sequences of their own, whose distances are not of tokens"
    elif computes_own_attention(find_decoder(causal_lm)):
        why = "computes attention in code of its own, where q and k cannot be seen"
    else:
        return
    raise ValueError(
        f"{type(causal_lm).__name__} {why}: its attention cannot be measured. Leave the measures attention and entropy "
        "out: `rope-patch eval` runs those that are named, e.g. --cliff --gain --passkey --niah."
    )


def _visit_groups(call: AttentionCall, queries: torch.Tensor, visit: Visit) -> None:
    """Softmax of chosen queries over keys, of one row, in float32."""
    module, query, key, kwargs = call.module, call.query, call.key, call.options
    sinks = kwargs.get("s_aux")  # [n_heads], logits of their own in each head's softmax
    scaling = call.scale
    distance = queries[:, None] - torch.arange(key.shape[2], device=key.device)
    hidden = distance < 0
    if kwargs.get("sliding_window"):
        hidden |= distance >= kwargs["sliding_window"]
    mask = call.mask  # [1, 1 or n_heads, n, n], by which alone some families keep to a sliding window, as Phi-MoE
    bias = None
    if isinstance(mask, torch.Tensor):
        mask = mask[0, :, queries]
        bias = torch.where(mask, 0.0, -torch.inf) if mask.dtype == torch.bool else mask.float()
        bias = bias.expand(query.shape[1], -1, -1)
    group = query.shape[1] // key.shape[1]
    chosen = query[0, :, queries].float().unflatten(0, (key.shape[1], group))
    for head in range(key.shape[1]):
        scores = scaling * chosen[head] @ key[0, head].float().T
        if kwargs.get("softcap"):
            scores = kwargs["softcap"] * torch.tanh(scores / kwargs["softcap"])
        if bias is not None:
            scores = scores + bias[head * group : (head + 1) * group]
        scores = scores.masked_fill(hidden, -torch.inf)
        to_keys = torch.ones_like(scores[..., :1])
        if sinks is not None:
            of_group = sinks.float()[head * group : (head + 1) * group, None, None]
            to_keys = (scores.logsumexp(-1, keepdim=True) - of_group).sigmoid()
        visit(module.layer_idx, scores.softmax(-1), to_keys)


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
