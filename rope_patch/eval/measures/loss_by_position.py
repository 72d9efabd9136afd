"""Cross-entropy of each token given all before it, by its position: where a model's window ends."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from ..results.cache import data_hash
from ..results.json_values import json_values, with_nan
from ..results.loss_intervals import interval_over_blocks, interval_over_rows
from ..results.progress import token_bar
from ..results.result import Pairs, Result
from .base import Measure
from .comparisons import in_distribution_penalty
from .subject import Subject

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# positions that every window holds: left out of means, since their short contexts make the loss large in any model
FIRST_POSITION = 64
# tokens of the parts that the mean loss of each row is kept of
BLOCK = 64
ONE_ROW = f"blocks of {BLOCK} tokens of one row"


@dataclass(frozen=True, eq=False)
class LossByPosition(Result):
    """Mean cross-entropy by target position.

    Args:
        loss: entry p is the mean over rows of -log p(x_p | x_<p), in nats, float64 [seq_len]; entry 0 is nan, as
            nothing predicts the first token.
        n_rows: rows that the means are over.
        window: positions that the loss within and beyond is told by: those that the model was trained on, or, where
            models are compared, the first one's; None if its config names none.
        blocks: [n_rows][seq_len // 64], the mean loss of each row over target positions 64 k..64 k + 63, in nats, with
            0 in place of the first token's; empty where it was not kept. Two models are compared by these.
        rows_hash: of the token ids, "" where it was not kept: where it is equal, two models read the same rows.
    """

    title: ClassVar[str] = "Loss by position"
    column: ClassVar[str] = "loss"

    loss: torch.Tensor
    n_rows: int
    window: int | None = None
    blocks: tuple[tuple[float, ...], ...] = ()
    rows_hash: str = ""

    @property
    def seq_len(self) -> int:
        """Tokens in a row."""
        return len(self.loss)

    def mean(self, first: int, end: int) -> float:
        """Mean loss over target positions first..end-1, in nats."""
        if not 1 <= first < end <= self.seq_len:
            raise ValueError(
                f"positions must satisfy 1 <= first < end <= {self.seq_len}, got first={first} and end={end}."
            )
        return self.loss[first:end].mean().item()

    def in_window(self, window: int | None = None) -> float:
        """Mean loss over target positions 64..window, in nats; `window` None means the trained one."""
        return self.mean(FIRST_POSITION, min(self._window(window) + 1, self.seq_len))

    def cliff(self, window: int | None = None) -> float:
        """Mean loss over target positions beyond `window` minus that over 64..window, in nats.

        Args:
            window: None means the trained one.

        Raises:
            ValueError: the rows end within the window, so nothing was measured beyond it.

        Source: PosAug, FoGen 2026, its cliff metric.
        """
        window = self._window(window)
        if window + 1 >= self.seq_len:
            raise ValueError(
                f"rows of {self.seq_len} tokens do not reach beyond the window of {window}: use longer ones."
            )
        return self.mean(window + 1, self.seq_len) - self.in_window(window)

    def cliff_start(self, window: int | None = None, *, tolerance: float = 0.1) -> int | None:
        """First position beyond the window from which on the loss stays above that within it, or None.

        Means of 1/64 of the row are compared, since single positions scatter, and a rise over less than the last eighth
        of the positions beyond the window does not count, since texts scatter too.

        Args:
            window: None means the trained one.
            tolerance: nats that a mean must exceed the loss within the window by.
        """
        window = self._window(window)
        limit = self.in_window(window) + tolerance
        step = max(self.seq_len // 64, 1)
        start = None
        for first in range(window + 1, self.seq_len, step):
            end = min(first + step, self.seq_len)
            if self.mean(first, end) <= limit:
                start = None
            elif start is None:
                start = first
        if start is not None and self.seq_len - start < (self.seq_len - window) / 8:
            return None
        return start

    def _window(self, window: int | None) -> int:
        window = self.window if window is None else window
        if window is None:
            raise ValueError("the model's config names no trained window: pass window, in positions.")
        return window

    def bins(self, edges: Sequence[int]) -> list[dict[str, float]]:
        """Mean loss between neighbouring `edges`, as {first, end, loss}."""
        pairs = zip(edges, edges[1:], strict=False)
        return [{"first": a, "end": b, "loss": self.mean(max(a, 1), b)} for a, b in pairs]

    def to_dict(self) -> dict[str, Any]:
        return {
            "seq_len": self.seq_len,
            "n_rows": self.n_rows,
            "window": self.window,
            "loss": json_values(self.loss.tolist()),
            "blocks": json_values(self.blocks),
            "rows_hash": self.rows_hash,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        loss = torch.tensor(with_nan(values["loss"]), dtype=torch.float64)
        blocks = tuple(tuple(row) for row in with_nan(values.get("blocks", ())))
        return cls(loss, values["n_rows"], values["window"], blocks, values.get("rows_hash", ""))

    def binned(self, bin_size: int | None = None) -> list[dict[str, float]]:
        """Means of `bin_size` tokens from position 64 on; None means 1/64 of the row."""
        step = bin_size or max(self.seq_len // 64, 1)
        return self.bins([FIRST_POSITION, *range(FIRST_POSITION + step, self.seq_len, step), self.seq_len])

    @property
    def reaches_beyond(self) -> bool:
        """Whether positions beyond the trained window were measured, so that there is a cliff."""
        return self.window is not None and self.window + 1 < self.seq_len

    def headline(self) -> dict[str, float]:
        if not self.reaches_beyond:
            return {"loss (nats per token)": self.mean(FIRST_POSITION, self.seq_len)}
        return {
            f"loss 64..{self.window} (nats per token)": self.in_window(),
            f"loss beyond {self.window}": self.in_window() + self.cliff(),
            "cliff": self.cliff(),
        }

    def table(self) -> list[dict[str, Any]]:
        return [dict(row) for row in self.binned()]

    def over_window(self, window: int | None) -> Self:
        return replace(self, window=window)

    def beside(self, first: Self) -> dict[str, float]:
        return {"in-distribution penalty (%)": in_distribution_penalty(self, first)} if first.window else {}

    def pairs(self, first: Self, window: int | None) -> list[Pairs]:
        """The mean loss of each row in spans from a sixteenth of the window on in powers of two.

        Tokens of one text are no independent pairs. Where there is one row, its blocks of 64 tokens are compared, by an
        interval that takes account of how alike neighbours are.
        """
        if not first.blocks or not self.blocks:
            return []
        same = first.rows_hash == self.rows_hash
        edges = _edges(window, len(first.blocks[0]))
        # the same text twice, whose losses are alike to the last bit, would count as two texts that agree
        rows = list(dict.fromkeys((tuple(a), tuple(b)) for a, b in zip(first.blocks, self.blocks, strict=same)))
        found = []
        for start, end in zip(edges, edges[1:], strict=False):
            before, after = ([row[start:end] for row in of_model] for of_model in zip(*rows, strict=True))
            name = f"loss {BLOCK * start}..{BLOCK * end - 1}"
            unit, interval = ONE_ROW, interval_over_blocks
            if len(rows) > 1:
                before, after = [[[fmean(row) for row in of_model]] for of_model in (before, after)]
                unit, interval = "rows", interval_over_rows
            found.append(Pairs(before[0], after[0], unit, BLOCK * end, name=name, same=same, interval=interval))
        return found

    @classmethod
    def figure(cls, results: Mapping[str, Self]) -> "Figure":
        from ..results.figures import add_legend, mark_window, new_figure

        figure, (axes,) = new_figure()
        for label, curve in results.items():
            bins = curve.binned()
            axes.plot(
                [(b["first"] + b["end"]) / 2 for b in bins], [b["loss"] for b in bins], label=label, linewidth=1.8
            )
        longest = max(curve.seq_len for curve in results.values())
        for window in {curve.window for curve in results.values() if curve.window is not None}:
            mark_window(axes, window)
        rows = sorted({curve.n_rows for curve in results.values()})
        axes.set(
            title=f"loss by position, held-out rows: {', '.join(map(str, rows))}",
            xlabel="target position (tokens)",
            ylabel=f"loss (nats per token, mean of {max(longest // 64, 1)} tokens)",
            xlim=(0, longest),
        )
        axes.grid(alpha=0.25)
        add_legend(figure, axes)
        return figure

    @classmethod
    def readings(cls, results: Mapping[str, Self]) -> list[str]:
        said = []
        for label, curve in results.items():
            if not curve.reaches_beyond:
                why = (
                    "the trained window is not known"
                    if curve.window is None
                    else f"rows of {curve.seq_len} tokens end within the window of {curve.window} positions"
                )
                inside = curve.mean(FIRST_POSITION, curve.seq_len)
                said.append(f"{label}: {inside:.3f} nats per token. It has no cliff here: {why}.")
                continue
            inside, cliff, start = curve.in_window(), curve.cliff(), curve.cliff_start()
            said.append(
                f"{label}: {inside:.3f} nats per token within the window of {curve.window} positions, "
                f"{inside + cliff:.3f} beyond it, a cliff of {cliff:+.3f}"
                + ("; no lasting rise beyond the window." if start is None else f"; it rises for good from {start} on.")
            )
        beyond = any(curve.reaches_beyond for curve in results.values())
        flat = (
            "Flat beyond the dashed line: far text does no harm. Whether it is used, context gain and retrieval show."
        )
        return [*said, "Lower is better.", *([flat] if beyond else [])]


def loss_by_position(
    model: nn.Module, rows: torch.Tensor, *, batch_size: int = 1, progress: bool = True, title: str = "loss by position"
) -> LossByPosition:
    """Run `rows` through `model` in one causal forward each and average the loss at every position.

    The head is applied to chunks of tokens, so n x vocabulary values are never held. Attention is the model's own;
    under SDPA, without a view in force, layers with a sliding window are given no mask of n x n. Training mode is
    switched off meanwhile, so views that are sampled in training are not in force.

    Args:
        model: a Transformers causal LM, patched or not, bare or with adapters.
        rows: token ids, int64 [n_rows, seq_len], seq_len >= 2; no padding. Each begins as the tokenizer begins a text,
            as those of `text_rows` do.
        batch_size: rows in a forward.
        progress: whether to show a bar with the time left.
        title: its label.

    Raises:
        ValueError: rows of another shape, ids outside the vocabulary, or a model without an output head.
    """
    subject = Subject(model)
    subject.check_rows(rows)
    total = torch.zeros(rows.shape[1] - 1, dtype=torch.float64)
    blocks: list[tuple[float, ...]] = []
    with subject.evaluating(), token_bar(model, rows.numel(), title, show=progress) as done:
        for k, batch in enumerate(rows.split(batch_size), 1):
            ids = batch.to(subject.device)
            losses = F.pad(subject.losses(subject.hidden(ids)[:, :-1], ids[:, 1:]).double().cpu(), (1, 0))
            total += losses[:, 1:].sum(0)
            whole = losses[:, : losses.shape[1] // BLOCK * BLOCK]
            blocks += map(tuple, whole.unflatten(1, (-1, BLOCK)).mean(-1).tolist())
            done(k * batch_size * rows.shape[1])
    unknown = torch.full((1,), torch.nan, dtype=torch.float64)
    loss = torch.cat([unknown, total / len(rows)])
    return LossByPosition(loss, len(rows), subject.trained_window, tuple(blocks), data_hash(rows))


def _edges(window: int | None, n_blocks: int) -> list[int]:
    """Ends of the spans, in blocks: the first block is left out, as in all means of losses."""
    if window is None:
        return [1, n_blocks] if n_blocks > 1 else []
    inner = [window >> k for k in range(4, -1, -1)]
    outer = [window << k for k in range(1, 30)]
    edges = sorted({1, n_blocks, *(e // BLOCK for e in [*inner, *outer] if BLOCK < e < BLOCK * n_blocks)})
    return [e for e in edges if 1 <= e <= n_blocks] if n_blocks > 1 else []


CLIFF = Measure(
    name="cliff",
    result=LossByPosition,
    run=lambda job: loss_by_position(job.model, job.rows),
    help="loss at every position of a text (cross-entropy of the next token, in nats). The cliff is how much higher it "
    "is beyond the window that the model was trained on than within it",
    by_default=True,
    reads_rows=True,
    least=lambda window: FIRST_POSITION + 1,
)
