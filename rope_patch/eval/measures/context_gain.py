"""How much a model gains from reading more than a short context."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import torch
from torch import nn
from transformers import DynamicCache

from ...rope.rotary import forget_rows
from ..results.progress import token_bar
from ..results.result import Result
from .base import Measure
from .subject import Subject

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Kind = Literal["exact", "paper"]

SHORT = 512
"""Tokens of the short context where none are named."""
_STRIDE = 512


@dataclass(frozen=True)
class ContextGain(Result):
    """Loss from a short context minus loss from the whole row.

    Args:
        kind: of `gain` and `total`: "exact" or "paper", as in `context_gain`.
        short: tokens of the short context.
        edges: token indices between which `gain` is averaged.
        gain: mean of ce_short(i) - ce_full(i) for target i in [edges[k], edges[k + 1]), in nats per token.
        total: G(C), the mean over all targets from `short` to the end, in nats per token.
        n_rows: rows that the means are over.
        exact: G(C) by contexts read anew; equals `total` where `kind` is "exact".
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
        rows = [
            {"first": a, "end": b, "gain": g} for a, b, g in zip(self.edges, self.edges[1:], self.gain, strict=False)
        ]
        return [*rows, {"first": self.edges[0], "end": self.edges[-1], "gain": self.total}]

    @classmethod
    def figure(cls, results: Mapping[str, Self]) -> "Figure":
        from ..results.figures import add_legend, new_figure

        figure, (axes,) = new_figure()
        for label, result in results.items():
            middles = [(a + b) / 2 for a, b in zip(result.edges, result.edges[1:], strict=False)]
            axes.plot(middles, result.gain, label=label, linewidth=1.8)
        axes.axhline(0, color="0.4", linewidth=1)
        first = next(iter(results.values()))
        axes.set(
            title=f"gain of the whole row over its last {first.short} tokens"
            + (" by PosAug's definition, which gives too much" if first.kind == "paper" else ""),
            xlabel="target position (tokens)",
            ylabel="gain (nats per token)",
        )
        axes.grid(alpha=0.25)
        add_legend(figure, axes)
        return figure

    @classmethod
    def readings(cls, results: Mapping[str, Self]) -> list[str]:
        said = [
            f"{label}: reading everything instead of the last {r.short} tokens "
            f"{'gains' if r.exact >= 0 else 'costs'} {abs(r.exact):.3f} nats per token"
            + (f"; by PosAug's definition {r.total:+.3f}." if r.kind == "paper" else ".")
            for label, r in results.items()
        ]
        if any(r.kind == "paper" for r in results.values()):
            said.append(
                "PosAug's definition cuts the KV cache and restarts positions, but what is left in the cache keeps its "
                "old rotations: the model reads the short context at wrong distances, and the gain comes out too large."
            )
        return [*said, "Above zero, far text helps; below, the model would do better to forget it."]


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

    "exact" scores each target from its last short..short+stride-1 tokens, read anew with positions from 0: a fair short
    context. It begins as a text does: its first tokens give way to `begin`. The first `stride` targets have no token
    further back, and gain 0 by definition. "paper" cuts the KV cache to `short`
    entries that keep their old rotations, while each block of `stride` queries restarts at position `short`; distances
    to old keys are then wrong, often negative, which makes ce_short far too large and G with it. It is there to compare
    with published figures only, and comes beside the exact gain.

    Args:
        model: a causal LM.
        rows: token ids, int64 [n_rows, C], C > short, each beginning with `begin`.
        kind: "exact" or "paper".
        begin: token ids that the tokenizer puts before a text: `SpecialTokens.of(tokenizer).begin`, fewer than `short`.
        short: tokens of the short context, `begin` included.
        stride: targets that share a window; "exact" contexts are up to this much longer than `short`. None means 512,
            or an eighth of the targets of a row if that is less: fewer windows would compare much of a short row with
            itself.
        batch_size: short windows in a forward; the whole row is read one at a time.
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
        _refuse_sliding_windows(subject)
    seq_len = rows.shape[1]
    gains = {name: torch.zeros(seq_len - short, dtype=torch.float64) for name in dict.fromkeys(("exact", kind))}
    # the whole row and the short windows, which overlap; "paper" reads the row once more
    per_row = seq_len + len(range(0, seq_len - short, stride)) * (short + stride) + (kind == "paper") * seq_len
    with (
        subject.evaluating(),
        token_bar(model, len(rows) * per_row, "context gain", show=progress) as done,
    ):
        for k, row in enumerate(rows, 1):
            ids = row.to(subject.device)
            full = subject.losses(subject.hidden(ids[None])[:, :-1], ids[None, 1:])[0, short - 1 :]
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
    means = [gain[a - short : b - short].mean().item() for a, b in zip(edges, edges[1:], strict=False)]
    return ContextGain(kind, short, edges, means, gain.mean().item(), len(rows), gains["exact"].mean().item())


def _reencoded(
    subject: Subject, ids: torch.Tensor, begin: Sequence[int], short: int, stride: int, batch_size: int
) -> torch.Tensor:
    """ce_short of targets short..C-1: windows of short + stride tokens, whose last `stride` targets count."""
    starts = torch.arange(0, len(ids) - short, stride)
    first = torch.tensor(list(begin), dtype=ids.dtype, device=ids.device)
    losses = []
    whole = starts[starts + short + stride <= len(ids)]
    for batch in whole.split(batch_size) if len(whole) else ():
        windows = torch.stack([ids[a : a + short + stride] for a in batch.tolist()])
        windows[:, : len(first)] = first
        losses.append(subject.losses(subject.hidden(windows[:, :-1])[:, short - 1 :], windows[:, short:]).flatten())
    for a in starts[len(whole) :].tolist():  # what is left at the end of the row
        window = torch.cat([first, ids[a + len(first) :]])[None]
        losses.append(subject.losses(subject.hidden(window[:, :-1])[:, short - 1 :], window[:, short:]).flatten())
    return torch.cat(losses)


def _cut_cache(subject: Subject, ids: torch.Tensor, short: int, stride: int) -> torch.Tensor:
    """ce_short of targets short..C-1 from a cache that is cut to its last `short` entries before each block."""
    forget_rows(subject.causal_lm)
    cache = DynamicCache()
    losses = []
    first = 0
    while first < len(ids) - 1:
        end = min(first + (short if first == 0 else stride), len(ids) - 1)
        layers: list[Any] = cache.layers
        for layer in layers:
            layer.keys, layer.values = layer.keys[..., -short:, :], layer.values[..., -short:, :]
        past = min(first, short)
        positions = torch.arange(past, past + end - first, device=ids.device)[None]
        block = ids[None, first:end]
        hidden = subject.hidden(block, cache, position_ids=positions)
        # the block after the first `short` tokens predicts ids[first + 1 .. end]
        losses.append(subject.losses(hidden, ids[None, first + 1 : end + 1])[0])
        first = end
    return torch.cat(losses)[short - 1 :]


def _refuse_sliding_windows(subject: Subject) -> None:
    config = subject.causal_lm.config.get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None)
    if getattr(config, "sliding_window", None) and (kinds is None or any("full" not in kind for kind in kinds)):
        raise ValueError("kind='paper' cuts the KV cache, which sliding-window layers cut already; use kind='exact'.")


GAIN = Measure(
    name="gain",
    result=ContextGain,
    run=lambda job: context_gain(job.model, job.rows, begin=job.begin),
    help=f"context gain: how much lower the loss is when the model reads the whole text instead of its last {SHORT} "
    "tokens",
    by_default=True,
    reads_rows=True,
    least=lambda window: SHORT + 1,
)
