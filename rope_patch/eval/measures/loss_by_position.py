"""Loss by position: cross-entropy of each token given all tokens before it, which shows where the window ends."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean
from typing import Any, ClassVar, Self

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from ..results.cache import data_hash
from ..results.figures import Figure, line_figure, mark_window
from ..results.json_values import json_values, with_nan
from ..results.loss_intervals import interval_over_blocks, interval_over_rows
from ..results.progress import token_bar
from ..results.result import Pairs, Result
from .base import Measure
from .comparisons import in_distribution_penalty
from .subject import Subject

# means begin here: with a shorter context, the loss of any model is large
FIRST_POSITION = 64
# tokens of a block; the mean loss of each block of a row is stored
BLOCK = 64
_ONE_ROW = (
    "Losses are those of a single row, and other texts may differ. `rope-patch eval --cliff --rows 8` compares both "
    "models on more."
)


@dataclass(frozen=True, eq=False)
class LossByPosition(Result):
    """Mean cross-entropy by target position.

    Args:
        loss: entry p is the mean over rows of -log p(x_p | x_<p), in nats, float64 [seq_len]; entry 0 is NaN, because
            nothing predicts the first token.
        n_rows: number of rows in the means.
        window: positions that separate the loss within from the loss beyond: the trained window of the model, or that
            of the baseline if models are compared; None if the config names no window.
        blocks: [n_rows][seq_len // 64], mean loss of each row over target positions 64 k..64 k + 63, in nats, with 0
            for the first token. Models are compared by these blocks; without them, (), they are not compared.
        rows_hash: hash of the token ids. Two models with the same hash read the same rows.
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
        """Mean loss over target positions 64..window, in nats; None means the trained window."""
        return self.mean(FIRST_POSITION, min(self._window(window) + 1, self.seq_len))

    def cliff(self, window: int | None = None) -> float:
        """Mean loss over target positions beyond `window` minus that over 64..window, in nats.

        Args:
            window: in positions; None means the trained window.

        Raises:
            ValueError: the rows end within the window.

        Source: PosAug, FoGen 2026, its cliff metric.
        """
        window = self._window(window)
        if window + 1 >= self.seq_len:
            raise ValueError(
                f"rows of {self.seq_len} tokens do not reach beyond the window of {window}: use longer rows."
            )
        return self.mean(window + 1, self.seq_len) - self.in_window(window)

    def cliff_start(self, window: int | None = None, *, tolerance: float = 0.1) -> int | None:
        """First position beyond the window from which the loss stays above the loss within it; None if it does not.

        Means over 1/64 of the row are compared, because single positions are noisy. A rise over less than the last
        eighth of the positions beyond the window does not count, because texts are noisy too.

        Args:
            window: in positions; None means the trained window.
            tolerance: nats by which a mean must exceed the loss within the window.
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
        lasts = start is not None and self.seq_len - start >= (self.seq_len - window) / 8
        return start if lasts else None

    def _window(self, window: int | None) -> int:
        window = self.window if window is None else window
        if window is None:
            raise ValueError("the model's config names no trained window: pass window, in positions.")
        return window

    def bins(self, edges: Sequence[int]) -> list[dict[str, float]]:
        """Mean loss between neighbouring `edges`, as {first, end, loss}."""
        return [{"first": a, "end": b, "loss": self.mean(max(a, 1), b)} for a, b in pairwise(edges)]

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
        blocks = tuple(map(tuple, with_nan(values["blocks"])))
        return cls(loss, values["n_rows"], values["window"], blocks, values["rows_hash"])

    @property
    def reaches_beyond(self) -> bool:
        """Whether positions beyond the window were measured, so that a cliff is defined."""
        return self.window is not None and self.window + 1 < self.seq_len

    def headline(self) -> dict[str, float]:
        if not self.reaches_beyond:
            return {"loss (nats per token)": self.mean(FIRST_POSITION, self.seq_len)}
        return {
            f"loss 64..{self.window} (nats per token)": self.in_window(),
            f"loss beyond {self.window}": self.in_window() + self.cliff(),
            "rise of the loss beyond the window": self.cliff(),
        }

    def table(self) -> list[dict[str, Any]]:
        step = max(self.seq_len // 64, 1)
        return self.bins([FIRST_POSITION, *range(FIRST_POSITION + step, self.seq_len, step), self.seq_len])

    def figures(self, window: int | None) -> list[tuple[str, str, float]]:
        end = min(window or self.seq_len, self.seq_len)
        inside = self.in_window(end)
        losses = [(f"loss to position {end:,}, in nats", "%.3f", inside)]
        if end + 1 < self.seq_len:
            losses.append((f"loss from there to {self.seq_len:,}", "%.3f", inside + self.cliff(end)))
        return losses

    def over_window(self, window: int | None) -> Self:
        return replace(self, window=window)

    def compared_with(self, first: Self) -> dict[str, float]:
        return {"in-distribution penalty (%)": in_distribution_penalty(self, first)} if first.window else {}

    def pairs(self, first: Self, window: int | None) -> list[Pairs]:
        """The mean loss of each row in spans that begin at a sixteenth of the window and double in length.

        The first quarter of a window beyond it is a span of its own.

        The tokens of one text depend on each other, so a row is one pair. A single row is compared by its blocks of 64
        tokens, with an interval that allows for the correlation of neighbouring blocks.
        """
        if not first.blocks or not self.blocks:
            return []
        same = first.rows_hash == self.rows_hash
        # a text that is read twice has equal losses and must count once, not as two texts that agree
        rows = list(dict.fromkeys(zip(first.blocks, self.blocks, strict=same)))
        found = []
        for start, end in pairwise(_edges(window, len(first.blocks[0]))):
            if len(rows) > 1:
                unit, interval, note = "rows", interval_over_rows, ""
                before, after = ([fmean(row[k][start:end]) for row in rows] for k in (0, 1))
            else:
                unit, interval, note = f"blocks of {BLOCK} tokens of one row", interval_over_blocks, _ONE_ROW
                before, after = (list(blocks[start:end]) for blocks in rows[0])
            first_token, last = BLOCK * start, BLOCK * end - 1
            found.append(
                Pairs(
                    before,
                    after,
                    unit,
                    BLOCK * end,
                    name=f"loss {first_token}..{last}",
                    same=same,
                    interval=interval,
                    sentence=f"text at positions {first_token:,} to {last:,}: the right next token gets {{}}",
                    note=note,
                )
            )
        return found

    @classmethod
    def figure(cls, results: Mapping[str, Self]) -> Figure:
        curves = {}
        for label, curve in results.items():
            bins = curve.table()
            curves[label] = [(b["first"] + b["end"]) / 2 for b in bins], [b["loss"] for b in bins]
        longest = max(curve.seq_len for curve in results.values())
        n_rows = sorted({curve.n_rows for curve in results.values()})
        figure, axes = line_figure(
            curves,
            title=f"loss by position, held-out rows: {', '.join(map(str, n_rows))}",
            xlabel="target position (tokens)",
            ylabel=f"loss (nats per token, mean of {max(longest // 64, 1)} tokens)",
            xlim=(0, longest),
        )
        for window in {curve.window for curve in results.values() if curve.window is not None}:
            mark_window(axes, window)
        return figure

    @classmethod
    def readings(cls, results: Mapping[str, Self]) -> list[str]:
        sentences = []
        for label, curve in results.items():
            if not curve.reaches_beyond:
                why = (
                    "the trained window is not known"
                    if curve.window is None
                    else f"rows of {curve.seq_len} tokens end within the window of {curve.window} positions"
                )
                inside = curve.mean(FIRST_POSITION, curve.seq_len)
                sentences.append(
                    f"{label}: {inside:.3f} nats per token. Nothing beyond the window was measured: {why}."
                )
                continue
            inside, cliff, start = curve.in_window(), curve.cliff(), curve.cliff_start()
            sentences.append(
                f"{label}: {inside:.3f} nats per token within the window of {curve.window} positions and "
                f"{inside + cliff:.3f} beyond it ({cliff:+.3f}). "
                + ("No rise beyond the window lasts." if start is None else f"It rises for good at {start}.")
            )
        sentences.append("Lower is better.")
        if any(curve.reaches_beyond for curve in results.values()):
            sentences.append(
                "A curve that stays flat beyond the dashed line means that far text does no harm. Context gain and "
                "retrieval show whether the model uses it."
            )
        return sentences


def loss_by_position(
    model: nn.Module, rows: torch.Tensor, *, batch_size: int = 1, progress: bool = True, title: str = "loss by position"
) -> LossByPosition:
    """Read each row in one causal forward pass, and average the loss at every position over rows.

    The head is applied to chunks of tokens, so the n x vocabulary logits of a row are never in memory at once. The
    model computes its own attention; with SDPA and no active view, layers with a sliding window get no n x n mask. The
    model is in eval mode meanwhile, so views that training samples are off.

    Args:
        model: a Transformers causal LM, patched or not, with adapters or without.
        rows: token ids, int64 [n_rows, seq_len], seq_len >= 2, without padding. Each row begins with the tokens that
            the tokenizer puts before a text, as the rows of `text_rows` do.
        batch_size: rows in a forward pass.
        progress: whether to show a bar with the time left.
        title: label of the bar.

    Raises:
        ValueError: rows of another shape, ids outside the vocabulary, or a model without an output head.
    """
    subject = Subject(model)
    subject.check_rows(rows)
    total = torch.zeros(rows.shape[1] - 1, dtype=torch.float64)  # [seq_len - 1]
    blocks: list[tuple[float, ...]] = []
    with subject.evaluating(), token_bar(model, rows.numel(), title, show=progress) as done:
        for k, batch in enumerate(rows.split(batch_size), 1):
            ids = batch.to(subject.device)
            losses = subject.losses(subject.hidden(ids)[:, :-1], ids[:, 1:]).double().cpu()  # [batch, seq_len - 1]
            total += losses.sum(0)
            losses = F.pad(losses, (1, 0))  # [batch, seq_len], by target position
            whole = losses[:, : losses.shape[1] // BLOCK * BLOCK]  # without the last tokens, which fill no block
            blocks += map(tuple, whole.unflatten(1, (-1, BLOCK)).mean(-1).tolist())  # [batch, n_blocks]
            done(k * batch_size * rows.shape[1])
    loss = F.pad(total / len(rows), (1, 0), value=torch.nan)  # [seq_len]
    return LossByPosition(loss, len(rows), subject.trained_window, tuple(blocks), data_hash(rows))


def _edges(window: int | None, n_blocks: int) -> list[int]:
    """Edges of the spans, in blocks: window / 16 and its doublings, and 5 / 4 of the window.

    A model reads on a little beyond its window, and a mean over that and what follows would hide where it fails. The
    first block is left out, as in all means.
    """
    if n_blocks < 2:
        return []
    edges = [] if window is None else [window >> k for k in range(4, 0, -1)] + [window << k for k in range(30)]
    edges += [] if window is None else [window * 5 // 4]
    return sorted({1, n_blocks, *(edge // BLOCK for edge in edges if BLOCK < edge < BLOCK * n_blocks)})


CLIFF = Measure(
    name="cliff",
    result=LossByPosition,
    run=lambda job: loss_by_position(job.model, job.rows),
    help="loss at every position of a text (cross-entropy of the next token, in nats), and how much it rises beyond "
    "the context window that the model was trained on",
    by_default=True,
    reads_rows=True,
    least=lambda window: FIRST_POSITION + 1,
)
