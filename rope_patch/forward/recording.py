"""A record of the RoPE positions that the forwards of a model drew, to plot or to compare with a formula."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..rope.rotary import find_decoder
from .drawn_view import DrawnView

_LOGS = "_rope_patch_position_logs"


@dataclass(frozen=True, eq=False)
class DrawnPositions:
    """RoPE positions that one forward drew for one document.

    Args:
        step: optimizer step of the draw, -1 in an evaluation. Without a trainer, forwards are counted.
        document: number of the document within the step. Under trainers other than `RopeSFTTrainer`, a 32-bit hash of
            the document's tokens, by which they draw.
        view: name of the view.
        parameters: what the view drew, such as split and skip: a number, or a tensor [L] if it differs by token.
        positions: r(t) of the tokens t = 0, 1, ..., L - 1, without padding: int64 or float64, [L], on the CPU.
        layers: the layers that have these positions.
    """

    step: int
    document: int
    view: str
    parameters: dict[str, int | float | torch.Tensor]
    positions: torch.Tensor
    layers: tuple[int, ...]


class PositionLog:
    """Writes what is drawn for a decoder into `records`."""

    def __init__(self, n_layers: int) -> None:
        self.n_layers = n_layers
        self.records: list[DrawnPositions] = []

    @torch.compiler.disable
    def add(self, drawn: DrawnView, step: torch.Tensor | int, document: torch.Tensor) -> None:
        """Record each document of a forward.

        Args:
            drawn: with `t`.
            step: of the draws.
            document: number of each document, in the shape of documents.
        """
        assert drawn.t is not None
        shape = (len(drawn.documents.start), drawn.t.shape[1])
        t, ordinal, numbers = (x.expand(shape) for x in (drawn.t, drawn.documents.ordinal, document))
        for layers, group in drawn.by_layer(self.n_layers):
            if not group.view.perturbs:
                continue
            moved = group.view.rope_index(t, group.parameters).expand(shape)
            for i in range(int(ordinal.max()) + 1):
                tokens = (ordinal == i) & (t >= 0)
                if bool(tokens.any()):
                    values = {n: _of_document(group.parameters[n].expand(shape)[tokens]) for n in group.logged()}
                    number = int(numbers[tokens][0])
                    positions = moved[tokens].detach().cpu()
                    one = DrawnPositions(int(step), number, group.view.name, values, positions, tuple(layers))
                    self.records.append(one)


def _of_document(values: torch.Tensor) -> int | float | torch.Tensor:
    """One number if all tokens have it."""
    return values[0].item() if bool((values == values[0]).all()) else values.detach().cpu()


@contextmanager
def record_positions(model: nn.Module) -> Iterator[list[DrawnPositions]]:
    """Record the RoPE positions that forwards inside the block draw, in training and in evaluation.

    Forwards without a view or with explicit indices are not recorded, nor are tokens decoded with a cache, which keep
    the draws of its first forward. Each document takes L numbers of CPU memory; the GPU is waited for.

        with record_positions(model) as drawn:
            trainer.train()
        for document in drawn:
            plt.plot(document.positions, label=f"step {document.step}: {document.parameters}")

    Args:
        model: a model with RoPE, patched now or later.

    Returns:
        A list of `DrawnPositions`, one for each document of each forward, and for each group of layers that have
        positions of their own. It stays after the block.
    """
    decoder: Any = find_decoder(model)
    log = PositionLog(decoder.config.num_hidden_layers)
    setattr(decoder, _LOGS, (*logs_of(decoder), log))
    try:
        yield log.records
    finally:
        setattr(decoder, _LOGS, tuple(other for other in logs_of(decoder) if other is not log))
        if not logs_of(decoder):
            delattr(decoder, _LOGS)


def logs_of(decoder: nn.Module) -> tuple[PositionLog, ...]:
    """The logs of the open blocks of a decoder."""
    logs: tuple[PositionLog, ...] = getattr(decoder, _LOGS, ())
    return logs
