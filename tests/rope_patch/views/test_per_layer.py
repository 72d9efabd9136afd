"""Views that differ by layer: formula, what is refused."""

import pytest
import torch
from support.views import Case, behind_skip

from rope_patch.views import Mix, PerLayer, Skip, Standard, Uniform


def _each_layer(t, n, drawn):
    return torch.stack([behind_skip(t, split, skip) for split, skip in zip(drawn["split"], drawn["skip"], strict=True)])


CASES = {
    "per-layer-top": Case(
        PerLayer(Skip(split=4, skip=23), "top"),
        lambda t, n, drawn: torch.stack([t, behind_skip(t, 4, 23), behind_skip(t, 4, 23)]),
    ),
    "per-layer": Case(PerLayer(Skip(skip=Uniform(1, 90))), _each_layer),
}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PerLayer(Mix([Skip(), Standard()]), "top"), "view 'per-layer': .* stands alone, and so does 'mix'"),
        (lambda: PerLayer({"view": "yarn"}), "'yarn' is a rescaling; a view is one of"),
    ],
)
def test_what_per_layer_cannot_do_is_said(make, message):
    with pytest.raises(ValueError, match=message):
        make()
