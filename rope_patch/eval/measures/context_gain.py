"""Context gain: how much lower the loss is with the whole text than with a short context."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Literal, Self, get_args

import torch
from torch import nn
from transformers import DynamicCache

from ...rope.rotary import forget_rows
from ..results.figures import Figure, line_figure
from ..results.progress import token_bar
from ..results.result import Result
from .base import Measure
from .subject import Subject

Kind = Literal["exact", "paper"]

SHORT = 512
"""Default length of the short context, in tokens."""
_STRIDE = 512


@dataclass(frozen=True)
class ContextGain(Result):
    """Loss with a short context minus loss with the whole row.

    Args:
        kind: definition of `gain` and `total`, "exact" or "paper", as in `context_gain`.
        short: tokens of the short context.
        edges: [n_bins + 1], edges of the bins, as token indices.
        gain: [n_bins], mean of ce_short(i) - ce_full(i) for targets i in [edges[k], edges[k + 1]), in nats per token.
        total: G(C), the mean over all targets from `short` to the end, in nats per token.
        n_rows: number of rows in the means.
        exact: G(C) by the exact definition; equals `total` if `kind` is "exact".
    """

    title: ClassVar[str] = "Context gain"
    column: ClassVar[str] = "gain"

    kind: Kind
    short: int
    edges: list[int]
    gain: list[float]
    total: float
    n_rows: int
    exact: float

    def headline(self) -> dict[str, float]:
        figures = {f"context gain over {self.short} tokens (nats per token)": self.exact}
        if self.kind == "paper":
            figures["the same by PosAug's definition, which gives too much"] = self.total
        return figures

    def table(self) -> list[dict[str, Any]]:
        rows = [{"first": a, "end": b, "gain": g} for (a, b), g in zip(pairwise(self.edges), self.gain, strict=True)]
        return [*rows, {"first": self.edges[0], "end": self.edges[-1], "gain": self.total}]

    @classmethod
    def figure(cls, results: Mapping[str, Self]) -> Figure:
        first = next(iter(results.values()))
        figure, axes = line_figure(
            {label: ([(a + b) / 2 for a, b in pairwise(r.edges)], r.gain) for label, r in results.items()},
            title=f"gain of the whole row over its last {first.short} tokens"
            + (" by PosAug's definition, which is too large" if first.kind == "paper" else ""),
            xlabel="target position (tokens)",
            ylabel="gain (nats per token)",
        )
        axes.axhline(0, color="0.4", linewidth=1)
        return figure

    @classmethod
    def readings(cls, results: Mapping[str, Self]) -> list[str]:
        sentences = [
            f"{label}: reading everything instead of the last {r.short} tokens "
            f"{'gains' if r.exact >= 0 else 'costs'} {abs(r.exact):.3f} nats per token"
            + (f"; by PosAug's definition {r.total:+.3f}." if r.kind == "paper" else ".")
            for label, r in results.items()
        ]
        if any(r.kind == "paper" for r in results.values()):
            sentences.append(
                "PosAug's definition cuts the KV cache and restarts positions, but the keys left in the cache keep "
                "their old rotations. The model reads the short context at wrong distances, so the gain comes out too "
                "large."
            )
        return [*sentences, "Above zero, far text helps. Below zero, the model would do better without it."]


def context_gain(
    model: nn.Module,
    rows: torch.Tensor,
    *,
    kind: Kind = "exact",
    begin: Sequence[int] = (),
    short: int = SHORT,
    stride: int | None = None,
    batch_size: int = 8,
    n_bins: int = 32,
    progress: bool = True,
) -> ContextGain:
    """G(C) = mean over targets i in short..C-1 of ce_short(i) - ce_full(i), with C the length of `rows`.

    "exact" scores each target from its last short..short+stride-1 tokens, read anew at positions from 0, with `begin`
    in place of the first of them, as a text begins. The first `stride` targets have all their tokens in the short
    context, so their gain is 0.

    "paper" cuts the KV cache to `short` entries, which keep their old rotations, while each block of `stride` queries
    restarts at position `short`. Distances to old keys are then wrong, often negative, so ce_short and G come out far
    too large. Use it only to compare with published figures; the exact gain is always measured too.

    Args:
        model: a causal LM.
        rows: token ids, int64 [n_rows, C], C > short, each beginning with `begin`.
        kind: "exact" or "paper".
        begin: token ids that the tokenizer puts before a text, `SpecialTokens.of(tokenizer).begin`; fewer than `short`.
        short: tokens of the short context, `begin` included.
        stride: targets that share a window; "exact" contexts are longer than `short` by less than `stride`. None means
            512, or an eighth of the targets of a row if that is less, because with few windows most of a short row
            would be compared with itself.
        batch_size: short windows in a forward pass; whole rows are read one at a time.
        n_bins: points of the curve.
        progress: whether to show a bar.

    Raises:
        ValueError: rows that are too short or do not begin with `begin`, or "paper" with sliding-window layers.

    Source: PosAug, FoGen 2026, context gain.
    """
    if kind not in ("exact", "paper"):
        raise ValueError(f"kind must be 'exact' or 'paper', got {kind!r}.")
    subject = Subject(model)
    subject.check_rows(rows, at_least=short + 1)
    if stride is None:
        stride = min(_STRIDE, max((rows.shape[1] - short) // 8, 1))
    if len(begin) >= short or rows[:, : len(begin)].tolist() != [list(begin)] * len(rows):
        raise ValueError(
            f"begin must be fewer than short={short} tokens that every row begins with, got {list(begin)}."
        )
    if kind == "paper":
        config = subject.causal_lm.config.get_text_config(decoder=True)
        layers = getattr(config, "layer_types", None)
        if getattr(config, "sliding_window", None) and (layers is None or any("full" not in layer for layer in layers)):
            raise ValueError("kind='paper' does not work with sliding-window layers: use kind='exact'.")
    seq_len = rows.shape[1]
    # [C - short] each, means over rows
    gains = {name: torch.zeros(seq_len - short, dtype=torch.float64) for name in dict.fromkeys(("exact", kind))}
    # tokens read of each row: the row, its short windows, which overlap, and for "paper" the row once more
    per_row = seq_len + len(range(0, seq_len - short, stride)) * (short + stride) + (kind == "paper") * seq_len
    with subject.evaluating(), token_bar(model, len(rows) * per_row, "context gain", show=progress) as done:
        for k, row in enumerate(rows, 1):
            ids = row.to(subject.device)
            full = subject.losses(subject.hidden(ids[None])[:, :-1], ids[None, 1:])[0, short - 1 :]  # [C - short]
            for name, gain in gains.items():
                cut = (
                    _reencoded(subject, ids, begin, short, stride, batch_size)
                    if name == "exact"
                    else _cut_cache(subject, ids, short, stride)
                )
                gain += (cut.double() - full.double()).cpu() / len(rows)
            done(k * per_row)
    gain = gains[kind]
    edges = torch.linspace(short, seq_len, min(n_bins, seq_len - short) + 1).round().long().tolist()
    means = [gain[a - short : b - short].mean().item() for a, b in pairwise(edges)]
    return ContextGain(kind, short, edges, means, gain.mean().item(), len(rows), gains["exact"].mean().item())


def _reencoded(
    subject: Subject, ids: torch.Tensor, begin: Sequence[int], short: int, stride: int, batch_size: int
) -> torch.Tensor:
    """ce_short of targets short..C-1, [C - short]: of windows of short + stride tokens, the last `stride` losses."""
    starts = range(0, len(ids) - short, stride)
    whole = [a for a in starts if a + short + stride <= len(ids)]
    # batches of whole windows, then each shorter window at the end of the row
    batches = [whole[k : k + batch_size] for k in range(0, len(whole), batch_size)]
    batches += [[a] for a in starts[len(whole) :]]
    losses = []
    for batch in batches:
        windows = torch.stack([ids[a : a + short + stride] for a in batch])  # [batch, short + stride or fewer]
        windows[:, : len(begin)] = torch.tensor(list(begin), dtype=ids.dtype, device=ids.device)
        losses.append(subject.losses(subject.hidden(windows[:, :-1])[:, short - 1 :], windows[:, short:]).flatten())
    return torch.cat(losses)


def _cut_cache(subject: Subject, ids: torch.Tensor, short: int, stride: int) -> torch.Tensor:
    """ce_short of targets short..C-1, [C - short], from a cache cut to its last `short` entries before each block."""
    forget_rows(subject.causal_lm)
    cache = DynamicCache()
    losses = []
    first = 0
    while first < len(ids) - 1:
        end = min(first + (short if first == 0 else stride), len(ids) - 1)
        layers: list[Any] = cache.layers
        for layer in layers:
            # [1, n_kv_heads, short or fewer, head_dim], rotated by the positions that they had
            layer.keys, layer.values = layer.keys[..., -short:, :], layer.values[..., -short:, :]
        past = min(first, short)
        positions = torch.arange(past, past + end - first, device=ids.device)[None]
        hidden = subject.hidden(ids[None, first:end], cache, position_ids=positions)
        # the block predicts ids[first + 1 .. end]
        losses.append(subject.losses(hidden, ids[None, first + 1 : end + 1])[0])
        first = end
    # losses are of targets 1, 2, ...
    return torch.cat(losses)[short - 1 :]


GAIN = Measure(
    name="gain",
    result=ContextGain,
    run=lambda job: context_gain(job.model, job.rows, kind=job.plan.gain, begin=job.begin),
    help=f"context gain: how much lower the loss is with the whole text than with its last {SHORT} tokens. `paper` "
    "adds PosAug's definition, to compare with its figures; it gives too much",
    argument={"nargs": "?", "const": "exact", "choices": get_args(Kind)},
    by_default=True,
    reads_rows=True,
    settings=("gain",),
    least=lambda window: SHORT + 1,
)
