"""Views one after the other: formula, draws, what is refused."""

import pytest
import torch
from support.views import Case, L, behind_skip, drawn, index

from rope_patch.views import RPE, Compose, Dilation, Mix, NoPE, PosAug, Skip, Standard, Uniform

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


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Compose([Skip(), Standard()]), "Standard\\(\\) changes nothing: leave it out"),
        (lambda: Compose([Skip(), NoPE()]), "view 'nope' leaves no distances that the others could change"),
        (lambda: Compose([Dilation(), RPE()]), "view 'rpe' goes by the index of a token, so it must come first"),
        (lambda: Compose([]), "views must be a list of at least one view, got \\[\\]."),
        (lambda: Compose([3]), "view 'compose' takes views such as Skip\\(.* or a name, got 3."),
        (lambda: Compose(["skp"]), "Unknown view 'skp'. Did you mean 'skip'"),
        (lambda: Compose([Mix([Skip(), Standard()])]), "view 'compose': .* stands alone, and so does 'mix'"),
        (
            lambda: Compose([{"view": "skip", "spilt": 3}]),
            "Unknown option 'spilt' of view 'skip'. Did you mean 'split'",
        ),
        (  # each of them alone is within 2**24
            lambda: Compose([Skip(split=5, skip=2**23), PosAug(8.0)]).check_length(30),
            "view 'compose': RoPE indices would reach 67109096",
        ),
    ],
)
def test_what_compose_cannot_do_is_said(make, message):
    with pytest.raises(ValueError, match=message):
        make()
