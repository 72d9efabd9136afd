"""Views one after the other: formula, draws, what is refused."""

import torch
from support.views import Case, L, behind_skip, drawn, index

from rope_patch.views import Compose, Dilation, PosAug, Skip, Uniform

CASES = {
    "compose": Case(
        Compose([Skip(split=4), PosAug(0.5)]),
        lambda t, n, drawn: 0.5 * behind_skip(t, 4, drawn["0.skip"]),
    ),
}


def test_compose_follows_its_formula():
    view = Compose([Skip(split=5, skip=7), Dilation(0.5)])
    assert index(view) == [0.5 * (i if i < 5 else i + 7) for i in range(L)]


def test_composed_views_draw_independently():
    parameters = drawn(Compose([Skip(), Skip()]))
    assert not torch.equal(parameters["0.split"], parameters["1.split"])


def test_nested_compositions_draw_apart():
    inner = Compose([Skip(), Skip()])
    parameters = drawn(Compose([inner, inner, Skip()]))
    splits = [value for name, value in parameters.items() if name.endswith("split")]
    assert len(splits) == 5
    for i, first in enumerate(splits):
        for second in splits[i + 1 :]:
            assert abs((first == second).double().mean() - 1 / L) < 0.03, "independent draws of 1 in L"


def test_compose_takes_the_dictionaries_of_a_recipe():
    view = Compose([{"view": "skip", "skip": Uniform(1, 3)}, PosAug()])
    assert view == Compose([Skip(skip=Uniform(1, 3)), PosAug()])
    assert view.perturbs
