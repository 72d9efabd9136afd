"""Views that differ by layer: formula, what is refused."""

import torch
from support.views import Case, behind_skip

from rope_patch.views import PerLayer, Skip, Uniform


def _each_layer(t, n, drawn):
    return torch.stack([behind_skip(t, split, skip) for split, skip in zip(drawn["split"], drawn["skip"], strict=True)])


CASES = {
    "per-layer-top": Case(
        PerLayer(Skip(split=4, skip=23), "top"),
        lambda t, n, drawn: torch.stack([t, behind_skip(t, 4, 23), behind_skip(t, 4, 23)]),
    ),
    "per-layer": Case(PerLayer(Skip(skip=Uniform(1, 90))), _each_layer),
}
