"""Queries scaled by their position, so that attention over a longer text does not get flatter."""

import math
from dataclasses import dataclass
from typing import Any

import torch

from ..base import papers
from ..families.queries import BETA, RECORD
from ..rope.rotary import is_nested
from .base import RESCALINGS, NativeRope, Rescaling, require_numbers, require_window


class _QueryScale(Rescaling):
    """Base of the laws, which keep frequencies and context window."""

    def rope_parameters(self, native: NativeRope) -> dict[str, Any]:
        return dict(native.rope_parameters)

    def target_window(self, native_window: int) -> int:
        return native_window


@RESCALINGS.register("temperature")
@dataclass(frozen=True)
class Temperature(_QueryScale):
    """The query at position p is multiplied by s(p) = 1 + beta ln(1 + floor(p / L0)); frequencies stay.

    p counts from the first token of a document. Layers with sliding-window or chunked attention are left out. What it
    does to a model was not measured here.

    Args:
        beta: above 0; Ministral 3 and Llama 4 have 0.1.
        original_max_position_embeddings: L0, in positions: up to L0 nothing changes.

    When: Take it for texts beyond L0, on a model that was rescaled and saved before.

    Source: the code of Ministral 3 in Transformers, which reads it for that family and Mistral 4 alone. Llama 4 has
    p + 1 in place of p, in its layers without RoPE.
    """

    beta: float
    original_max_position_embeddings: int

    cites = (papers.SSMAX,)
    synonyms = ("rope-temperature", "llama4-scaling")

    def __post_init__(self) -> None:
        require_numbers(self, beta=self.beta)
        require_window(self, "original_max_position_embeddings", self.original_max_position_embeddings)

    def rope_parameters(self, native: NativeRope) -> dict[str, Any]:
        own = {BETA: self.beta, "original_max_position_embeddings": self.original_max_position_embeddings}
        return {**native.rope_parameters, **(own if BETA in native.rope_parameters else {})}

    def query_scale(self, positions: torch.Tensor) -> torch.Tensor:
        return 1 + self.beta * torch.log1p(torch.floor(positions / self.original_max_position_embeddings))


@RESCALINGS.register("log-n")
@dataclass(frozen=True)
class LogN(_QueryScale):
    """The query at position p is multiplied by s(p) = max(1, ln(p + 1) / ln L0), or by c ln(p + 1); frequencies stay.

    p counts from the first token of a document. Layers with sliding-window or chunked attention are left out. What it
    does to a model was not measured here.

    Args:
        original_max_position_embeddings: L0, in positions: up to L0 nothing changes.
        scale: c, above 0, in place of L0: SSMax with a fixed slope, which changes near positions too.

    When: Take it as an ablation of 'temperature', or with `scale` for SSMax, to train with.

    Source: log n, Chiang and Cholak, arXiv:2202.12172, with Qwen's floor of 1; SSMax, arXiv:2501.19399.
    """

    original_max_position_embeddings: int | None = None
    scale: float | None = None

    cites = (papers.LOG_N, papers.SSMAX)
    synonyms = ("logn", "ssmax", "scalable-softmax")

    def __post_init__(self) -> None:
        window = self.original_max_position_embeddings
        require_numbers(self, scale=self.scale)
        require_window(self, "original_max_position_embeddings", window)
        if (window is None) == (self.scale is None) or window == 1:
            raise ValueError(
                "rescaling 'log-n' needs either original_max_position_embeddings, at least 2, or scale, got "
                f"{window} and {self.scale}."
            )

    def query_scale(self, positions: torch.Tensor) -> torch.Tensor:
        if self.scale is not None:
            return self.scale * torch.log1p(positions)
        assert self.original_max_position_embeddings is not None
        return (torch.log1p(positions) / math.log(self.original_max_position_embeddings)).clamp(min=1)


def query_scale_of(rope_parameters: dict[str, Any]) -> Rescaling | None:
    """The rescaling whose `query_scale` RoPE parameters name, of any layer type; None if queries stay."""
    for parameters in rope_parameters.values() if is_nested(rope_parameters) else [rope_parameters]:
        record = (parameters or {}).get(RECORD)
        if record is not None:
            rescaling: Rescaling = RESCALINGS[record["method"]](**record["options"])
            return rescaling
        if parameters and parameters.get(BETA):
            return Temperature(parameters[BETA], parameters["original_max_position_embeddings"])
    return None


def is_read_by_family(rope_parameters: dict[str, Any]) -> bool:
    """Whether the code of the family itself scales queries, by the true positions."""
    return bool(rope_parameters.get(BETA))
