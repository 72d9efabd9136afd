"""Positions stretched by a factor for each step: laws, curricula, what is refused."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import strategies as st
from support.views import Case, L, built, drawn, index, key, maybe, positive

from rope_patch.base.draws import DrawKey
from rope_patch.views import PosAug

CASES = {
    "posaug": Case(PosAug(low=2.0), lambda t, n, drawn: drawn["alpha"] * t),
}


STRATEGIES = {
    "posaug": lambda farthest: built(
        PosAug,
        low=maybe(positive),
        high=maybe(positive),
        law=maybe(st.sampled_from(["uniform", "log-uniform", "discrete", "cycling"])),
        values=maybe(st.lists(positive, min_size=1, max_size=4)),
        granularity=maybe(st.sampled_from(["step", "sample"])),
        curriculum=maybe(st.sampled_from(["linear", "step"])),
        start=maybe(st.tuples(positive, positive)),
        until=maybe(st.sampled_from([0.3, 0.7])),
    )
}


def test_posaug_follows_its_formula():
    assert index(PosAug(low=0.3, high=0.3)) == [0.3 * i for i in range(L)]  # float64: no rounding of its own


def test_posaug_draws_one_alpha_a_step():
    assert drawn(PosAug())["alpha"].shape == ()


@pytest.mark.parametrize(("law", "below_one"), [("uniform", (1 - 1 / 8) / (8 - 1 / 8)), ("log-uniform", 0.5)])
def test_posaug_laws(law, below_one):
    view = PosAug(law=law)
    alphas = torch.stack([view.draw(torch.tensor([[L]]), key(step=s))["alpha"] for s in range(600)])
    assert alphas.min() >= 1 / 8 and alphas.max() <= 8
    assert abs((alphas < 1).double().mean() - below_one) < 4 * math.sqrt(below_one * (1 - below_one) / 600)


def alphas_of(view, samples=6, steps=range(12), progress=None):
    progress = None if progress is None else torch.tensor(progress, dtype=torch.float64)
    keys = [replace(key(samples, step), progress=progress) for step in steps]
    return [view.draw(torch.full((samples, 1), L), k)["alpha"] for k in keys]


def test_posaug_from_a_set_of_values():
    cycle = alphas_of(PosAug(law="cycling", values=[1, 2, 4, 8]))
    assert [a.item() for a in cycle] == [1, 2, 4, 8] * 3
    chosen = torch.stack(alphas_of(PosAug(law="discrete", values=[0.5, 3.0]), steps=range(400)))
    assert set(chosen.tolist()) == {0.5, 3.0} and 0.4 < (chosen == 3).double().mean() < 0.6


@pytest.mark.parametrize("law", ["uniform", "log-uniform", "discrete"])
def test_posaug_is_shared_as_widely_as_asked(law):
    assert all(a.shape == () for a in alphas_of(PosAug(law=law)))
    view = PosAug(law=law, granularity="sample")
    alphas = view.draw(torch.full((400, 1), L), key(400))["alpha"]
    assert alphas.shape == (400, 1) and len(alphas.unique()) == (4 if law == "discrete" else 400)
    # a micro-batch is known by its first document, wherever it is in the step
    view = PosAug(law=law, granularity="micro-batch")
    first, second = (DrawKey(0, torch.tensor(3), torch.arange(a, a + 4)[:, None]) for a in (0, 4))
    drawn_apart = [view.draw(torch.full((4, 1), L), k)["alpha"] for k in (first, second, first)]
    assert all(a.shape == () for a in drawn_apart) and drawn_apart[0] == drawn_apart[2]
    assert law == "discrete" or drawn_apart[0] != drawn_apart[1]


def test_posaug_curricula_go_by_the_progress_of_training():
    view = PosAug(curriculum="linear", start=[0.5, 2.0])
    for progress, (low, high) in {0.0: (0.5, 2.0), 0.5: (0.3125, 5.0), 1.0: (0.125, 8.0)}.items():
        alphas = torch.stack(alphas_of(view, steps=range(600), progress=progress))
        assert low <= alphas.min() < low + 0.2 and high - 0.2 < alphas.max() <= high
    view = PosAug(curriculum="step", until=0.25, law="log-uniform")
    assert all(a == 1 for a in alphas_of(view, progress=0.2))
    assert all(a != 1 for a in alphas_of(view, progress=0.25))
    # without a trainer training is at its end
    assert alphas_of(view) == alphas_of(PosAug(law="log-uniform"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PosAug(low=2, high=1), "view 'posaug': low must not exceed high, got low=2 and high=1."),
        (lambda: PosAug(high=float("inf")), "high must be a finite number above 0, .* got inf."),
        (lambda: PosAug(values=[1.0]), "values is read with law='discrete' or 'cycling' alone, got values=\\[1.0\\]"),
        (
            lambda: PosAug(law="discrete", high=32),
            "high is read with law='uniform' or .* alone, got high=32",
        ),
        (lambda: PosAug(law="cycling", low=0.5), "low is read with law='uniform' or 'log-uniform' alone"),
        (lambda: PosAug(start=[0.5, 2]), "start is read with curriculum='linear' alone"),
        (lambda: PosAug(curriculum="linear", until=0.5), "until is read with curriculum='step' alone"),
        (lambda: PosAug(low=1, high=1), "every alpha is 1, which scales nothing"),
        (lambda: PosAug(law="cycling", values=[1, 1]), "every alpha is 1, which scales nothing"),
        (lambda: PosAug(low=2, high=2, law="log-uniform"), "law='log-uniform' says nothing where no alpha is drawn"),
        (lambda: PosAug(low=2, high=2, granularity="sample"), "granularity='sample' says nothing where no alpha"),
        (lambda: PosAug(curriculum="linear", start=[0.125, 8.0]), "goes from start=\\(0.125, 8.0\\) to an equal range"),
        (lambda: PosAug(law="discrete", values="12"), "values must be a list of numbers, got '12'"),
        (lambda: PosAug(law="discrete", values=3), "values must be a list of numbers, got 3"),
        (lambda: PosAug(law="discrete", values=[True]), "values must be a finite number above 0, .*got True"),
        (lambda: PosAug(curriculum="linear", start=1), "start must be a list of numbers, got 1"),
        (lambda: PosAug(low=float("nan")), "low must be a finite number above 0, .*got nan"),
        (lambda: PosAug(high=10**400), "high must be a finite number above 0"),
        (lambda: PosAug(law="normal"), "law must be one of \\('uniform', .*\\), got 'normal'."),
        (lambda: PosAug(granularity="row"), "granularity must be one of"),
        (lambda: PosAug(curriculum="cosine"), "curriculum must be one of"),
        (lambda: PosAug(law="discrete", values=[]), "values must hold at least one alpha"),
        (lambda: PosAug(curriculum="linear", start=[2.0]), "start must be"),
        (lambda: PosAug(curriculum="step", until=1.0), "until must be in"),
        (lambda: PosAug(law="cycling", granularity="sample"), "'cycling' goes by steps, got granularity='sample'"),
        (lambda: PosAug(law="discrete", curriculum="linear"), "curriculum 'linear' moves a range"),
        (lambda: PosAug(law="discrete", values=[64.0]).check_length(2**19), "RoPE indices would reach"),
        (lambda: PosAug(high=8).check_length(2**22), "RoPE indices would reach 33554424; at most 16777216"),
    ],
)
def test_what_posaug_cannot_do_is_said(make, message):
    with pytest.raises(ValueError, match=message):
        make()
