"""What the test file of a view starts from: its case of the matrices, its options at random, its draws."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import assume
from hypothesis import strategies as st

from rope_patch.base.draws import DrawKey
from rope_patch.layout.documents import Documents
from rope_patch.testing.models import PAD as PAD  # an end of sentences and a cue, too
from rope_patch.views import Cycling, Discrete, Linear, LogUniform, Step, Uniform, View

L = 12

# t [n] float64, tokens of the first forward, what was drawn for the document -> r(t), [n] or one a layer, [n_layers, n]
ByHand = Callable[[torch.Tensor, int, dict[str, Any]], torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A view, its formula written out once more, and what frequency j of d / 2 is multiplied by.

    For models of three layers.
    """

    view: View
    index: ByHand
    frequency: Callable[[torch.Tensor, dict[str, Any]], torch.Tensor] = lambda share, drawn: torch.ones_like(share)


def behind_skip(t: torch.Tensor, split: float, skip: float) -> torch.Tensor:
    """r(t) = t before `split`, t + `skip` from there on."""
    return torch.where(t >= split, t + skip, t)


def built(cls: type[View], **options: Any) -> Any:
    """Views of these options, those that are refused left out; None stands for an option that is not given."""

    @st.composite
    def made(draw: Any) -> View:
        chosen = {name: draw(strategy) for name, strategy in options.items()}
        try:
            return cls(**{name: value for name, value in chosen.items() if value is not None})
        except ValueError:
            assume(False)
            raise

    return made()


def maybe(strategy: Any) -> Any:
    """An option that may be left out."""
    return st.none() | strategy


integer_laws = st.sampled_from(
    [
        Uniform(1, 30), LogUniform(2, 30), LogUniform(), Discrete([1, 5]), Cycling([3, 4]), Step(Uniform(), until=0.3),
        Linear(LogUniform(1, 9), start=1), Linear(Uniform(), start=[2, 60]),
    ]
)  # fmt: skip
factor_laws = st.sampled_from(
    [
        Uniform(0.25, 4), LogUniform(0.5, 1.5), Discrete([0.5, 1, 4]), Cycling([1, 4]), Step(Uniform(0.5, 4)),
        Linear(Uniform(1, 4), start=[0.25, 0.5]),
    ]
)  # fmt: skip


def key(samples: int = 1, step: int = 0) -> DrawKey:
    """Of documents that are one a row."""
    return DrawKey(0, torch.tensor(step), torch.arange(samples)[:, None])


def drawn(view: View, samples: int = 2000, length: int = L) -> dict[str, torch.Tensor]:
    """Parameters of documents of one length, one a row."""
    return view.draw(torch.full((samples, 1), length), key(samples))


def index(view: View, length: int = L, t: torch.Tensor | None = None) -> list[float]:
    """r(t) of a document, or of other t."""
    parameters = view.draw(torch.tensor([[length]]), key())
    return view.rope_index(torch.arange(length)[None] if t is None else t, parameters)[0].tolist()


def first_changed(view: View, parameters: dict[str, torch.Tensor], length: torch.Tensor) -> torch.Tensor:
    """s of documents of [samples, 1] lengths, one a row."""
    documents = Documents(torch.zeros_like(length), length, torch.arange(len(length))[:, None])
    return view.affected_from(torch.arange(int(length.max()))[None], documents, parameters)
