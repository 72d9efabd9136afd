"""View KL: how much a model's predictions change when the end of a row moves to later positions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import torch
from torch import nn

from ...patch import rope_view
from ...views import Skip
from ..results.figures import Figure, line_figure
from ..results.progress import token_bar
from ..results.result import Result
from .base import Job, Measure
from .subject import Subject

Direction = Literal["reverse", "forward"]

_CHUNK = 512  # tokens whose log-probabilities are in memory at once


@dataclass(frozen=True)
class ViewKL(Result):
    """KL between the predictions with a skip and those at standard positions.

    Args:
        direction: "reverse", KL(skip, standard), or "forward", KL(standard, skip).
        seq_len: tokens in a row.
        split: index of the first moved token.
        skips: [n_skips], positions by which the tokens move.
        kl: [n_skips], mean over the moved tokens, in nats per token.
        n_rows: number of rows in the means.
    """

    title: ClassVar[str] = "Predictions after skipped positions"
    column: ClassVar[str] = "kl"

    direction: Direction
    seq_len: int
    split: int
    skips: list[int]
    kl: list[float]
    n_rows: int

    def headline(self) -> dict[str, float]:
        return {f"KL at a skip of {self.skips[-1]} positions (nats per token)": self.kl[-1]}

    def table(self) -> list[dict[str, Any]]:
        return [{"skip": y, "kl": kl} for y, kl in zip(self.skips, self.kl, strict=True)]

    @classmethod
    def figure(cls, results: Mapping[str, Self]) -> Figure:
        first = next(iter(results.values()))
        arguments = "skip, standard" if first.direction == "reverse" else "standard, skip"
        figure, axes = line_figure(
            {label: (result.skips, result.kl) for label, result in results.items()},
            marker="o",
            title=f"tokens {first.split} to {first.seq_len - 1} moved by the skip",
            xlabel="skip (positions)",
            ylabel=f"KL({arguments}) (nats per token)",
        )
        axes.set_ylim(bottom=0)
        return figure

    @classmethod
    def readings(cls, results: Mapping[str, Self]) -> list[str]:
        return [
            *(
                f"{label}: {r.kl[-1]:.3f} nats per token at a skip of {r.skips[-1]} positions."
                for label, r in results.items()
            ),
            "The end of each text moves to later positions, and the KL says how much predictions change. Zero is none.",
        ]


def view_kl(
    model: nn.Module,
    rows: torch.Tensor,
    skips: Sequence[int],
    *,
    split: int | None = None,
    direction: Direction = "reverse",
    progress: bool = True,
) -> ViewKL:
    """KL between next-token predictions under `Skip(split, skip)` and at standard positions, over tokens split..n-1.

    Args:
        model: a causal LM, patched or not.
        rows: token ids, int64 [n_rows, n]; each row begins with the tokens that the tokenizer puts before a text.
        skips: positions to skip, each at least 0.
        split: index of the first moved token, 0 < split < n; None means n // 2.
        direction: "reverse", as RPSD trains it, or "forward".
        progress: whether to show a bar.

    Raises:
        ValueError: an unknown direction.

    Source: RPSD, arXiv:2604.14339, whose loss is this KL.
    """
    subject = Subject(model)
    subject.check_rows(rows)
    split = rows.shape[1] // 2 if split is None else split
    if direction not in ("reverse", "forward"):
        raise ValueError(f"direction must be 'reverse' or 'forward', got {direction!r}.")
    totals = torch.zeros(len(skips), dtype=torch.float64)
    n_reads = 1 + len(skips)
    with subject.evaluating(), token_bar(model, rows.numel() * n_reads, "view KL", show=progress) as done:
        for n, row in enumerate(rows):
            ids = row[None].to(subject.device)
            with rope_view(model, "standard"):  # the model may have a view that is always active
                standard = subject.hidden(ids)[0, split:]  # [n - split, hidden]
            for k, skip in enumerate(skips):
                with rope_view(model, Skip(split=split, skip=skip) if skip else "standard"):
                    moved = subject.hidden(ids)[0, split:]  # [n - split, hidden]
                totals[k] += _mean_kl(subject, moved, standard, direction) / len(rows)
                done((n * n_reads + k + 2) * rows.shape[1])
    return ViewKL(direction, rows.shape[1], split, list(skips), totals.tolist(), len(rows))


def _mean_kl(subject: Subject, moved: torch.Tensor, standard: torch.Tensor, direction: Direction) -> float:
    total = 0.0
    for a, b in zip(moved.split(_CHUNK), standard.split(_CHUNK), strict=True):
        p, q = subject.log_probabilities(a), subject.log_probabilities(b)  # logs, float32 [n, vocab_size]
        if direction == "forward":
            p, q = q, p
        total += (p.exp() * (p - q)).sum(-1).double().sum().item()
    return total / len(moved)


def _measured(job: Job) -> ViewKL:
    """Rows within the window, and skips of 0 and of powers of two up to the length of a row."""
    length = job.plan.length
    rows = job.rows[:, : min(2048, (job.window or length) // 2, length)]
    return view_kl(job.model, rows, [0, *(2**k for k in range(6, 30) if 2**k <= length)])


VIEW_KL = Measure(
    name="view-kl",
    result=ViewKL,
    run=_measured,
    help="how much the predictions change when the second half of a text moves to later positions",
    by_default=True,
    reads_rows=True,
    settings=("window",),
)
