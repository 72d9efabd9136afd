"""The factor of each query of a forward, from a scale by position and the positions that a view gives."""

from functools import reduce

import torch

from ..rescalings.in_place import RopeParameters
from ..rescalings.query_scale import is_read_by_family
from .drawn_view import DrawnView, ForwardIndex


def query_scale(parameters: RopeParameters, drawn: ForwardIndex, positions: torch.Tensor) -> torch.Tensor | None:
    """Factor of each query, float64 [1 or batch, n]; None if nothing scales queries.

    Args:
        parameters: in force.
        drawn: RoPE indices of the forward, or of some of its layers.
        positions: true positions of the tokens, [1 or batch, n], or [axes, batch, n] of equal ones.
    """
    law = parameters.query_scale
    scales: list[torch.Tensor | None] = []
    if law is not None and is_read_by_family(parameters.rope_parameters):  # its code scales by true positions
        moved, done = (law.query_scale(_at_least_0(x)) for x in (drawn(positions), positions))
        scales = [] if moved is None or done is None else [moved / done]
    elif law is not None:
        scales = [law.query_scale(_at_least_0(drawn.counted(positions)))]
    if isinstance(drawn, DrawnView) and drawn.view.scales_queries:
        scales.append(drawn.view.query_scale(_at_least_0(drawn.counted(positions)), drawn.parameters))
    known = [scale for scale in scales if scale is not None]
    return reduce(torch.mul, known) if known else None


def _at_least_0(index: torch.Tensor) -> torch.Tensor:
    """Float64 [1 or batch, n]; padding has any index, and a NaN of its queries would reach other tokens."""
    return (index[0] if index.ndim == 3 else index).double().clamp(min=0)
