"""Positions stretched by a factor for each step: what shares one, what is refused."""

import pytest
import torch
from hypothesis import strategies as st
from support.views import Case, L, built, drawn, factor_laws, index, key, maybe

from rope_patch.base.draws import DrawKey
from rope_patch.views import Discrete, LogUniform, PosAug, Uniform

CASES = {
    "posaug": Case(PosAug(Uniform(2, 8)), lambda t, n, drawn: drawn["alpha"] * t),
}


STRATEGIES = {
    "posaug": lambda farthest: built(PosAug, alpha=factor_laws, granularity=maybe(st.sampled_from(["step", "sample"])))
}


def test_posaug_follows_its_formula():
    assert index(PosAug(0.3)) == [0.3 * i for i in range(L)]  # float64: no rounding of its own


def test_posaug_draws_one_alpha_a_step():
    assert drawn(PosAug())["alpha"].shape == ()


@pytest.mark.parametrize("law", [Uniform(1 / 8, 8), LogUniform(1 / 8, 8), Discrete([1, 2, 4, 8])], ids=str)
def test_posaug_is_shared_as_widely_as_asked(law):
    view = PosAug(law, granularity="sample")
    alphas = view.draw(torch.full((400, 1), L), key(400))["alpha"]
    assert alphas.shape == (400, 1) and len(alphas.unique()) == (4 if isinstance(law, Discrete) else 400)
    # a micro-batch is known by its first document, wherever it is in the step
    view = PosAug(law, granularity="micro-batch")
    first, second = (DrawKey(0, torch.tensor(3), torch.arange(a, a + 4)[:, None]) for a in (0, 4))
    drawn_apart = [view.draw(torch.full((4, 1), L), k)["alpha"] for k in (first, second, first)]
    assert all(a.shape == () for a in drawn_apart) and drawn_apart[0] == drawn_apart[2]
    assert isinstance(law, Discrete) or drawn_apart[0] != drawn_apart[1]
