"""Views one after the other: formula, draws, what is refused."""

import pytest
import torch
from support.views import Case, L, behind_skip, drawn, index

from rope_patch.views import RPE, Compose, Dilation, Mix, NoPE, PosAug, Skip, Standard

CASES = {
    "compose": Case(
        Compose([Skip(split=4), PosAug(low=0.5, high=0.5)]),
        lambda t, n, drawn: 0.5 * behind_skip(t, 4, drawn["0.skip"]),
    ),
}


def test_compose_follows_its_formula():
    view = Compose([Skip(split=5, skip=7), Dilation(low=0.5, high=0.5)])
    assert index(view) == [0.5 * (i if i < 5 else i + 7) for i in range(L)]


def test_composed_views_draw_independently():
    parameters = drawn(Compose([Skip(), Skip()]))
    assert not torch.equal(parameters["0.split"], parameters["1.split"])


def test_compose_takes_the_dictionaries_of_a_recipe():
    view = Compose([{"view": "skip", "max_skip": 3}, PosAug()])
    assert view == Compose([Skip(max_skip=3), PosAug()])
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
            lambda: Compose([{"view": "skip", "maxskip": 3}]),
            "Unknown option 'maxskip' of view 'skip'. Did you mean 'max_skip'",
        ),
        (  # each of them alone is within 2**24
            lambda: Compose([Skip(split=5, skip=2**23), PosAug(low=8.0, high=8.0)]).check_length(30),
            "view 'compose': RoPE indices would reach 67109096",
        ),
    ],
)
def test_what_compose_cannot_do_is_said(make, message):
    with pytest.raises(ValueError, match=message):
        make()
