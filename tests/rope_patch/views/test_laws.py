"""Laws and curricula: distributions against their formulas, reach, recipes, what is refused."""

import json
import math
from dataclasses import replace

import pytest
import torch
from support.views import key

from rope_patch.methods import resolve_method, resolve_view
from rope_patch.views import Cycling, Discrete, Linear, LogUniform, Skip, Step, Uniform
from rope_patch.views.laws import sample, share_off

N = 40_000


def at(progress, n=N):
    return replace(key(n), progress=torch.tensor(progress, dtype=torch.float64))


def integers(law, most=12, k=None):
    k = k or key(N)
    return law.sample(k, 0, torch.full_like(k.sample, most)).flatten()


def reals(law, k=None):
    return law.sample(k or key(N), 0).flatten()


def require_shares(drawn, expected):
    """Frequencies of `expected`, value -> probability, which is all that is drawn."""
    assert drawn.dtype == torch.int64 and set(drawn.tolist()) == set(expected)
    for value, p in expected.items():
        assert abs((drawn == value).double().mean() - p) <= 4.5 * math.sqrt(p * (1 - p) / N)


def log_uniform(low, high):
    return {y: math.log(1 + 1 / y) / math.log((high + 1) / low) for y in range(low, high + 1)}


@pytest.mark.parametrize(
    ("law", "expected"),
    [
        (Uniform(), dict.fromkeys(range(1, 13), 1 / 12)),
        (Uniform(0), dict.fromkeys(range(13), 1 / 13)),
        (Uniform(-2, 5), dict.fromkeys(range(-2, 6), 1 / 8)),
        (Uniform(20), {12: 1.0}),  # a document that is too short for the range
        (LogUniform(), log_uniform(1, 12)),
        (LogUniform(1, 63), log_uniform(1, 63)),
        (LogUniform(5, 31), log_uniform(5, 31)),
        (Discrete([3, 9, 9, 40]), {3: 0.25, 9: 0.5, 40: 0.25}),
    ],
    ids=str,
)
def test_integers_are_drawn_by_their_law(law, expected):
    require_shares(integers(law), expected)


@pytest.mark.parametrize(
    ("law", "cdf"),
    [
        (Uniform(1 / 8, 8), lambda x: (x - 1 / 8) / (8 - 1 / 8)),
        (LogUniform(1 / 8, 8), lambda x: math.log(8 * x) / math.log(64)),
    ],
    ids=["uniform", "log-uniform"],
)
def test_real_numbers_are_drawn_by_their_law(law, cdf):
    drawn = reals(law).sort().values
    assert drawn.dtype == torch.float64
    rank = (torch.arange(N) + 0.5) / N
    assert (torch.tensor([cdf(x) for x in drawn.tolist()]) - rank).abs().max() < 2 / math.sqrt(N)  # Kolmogorov-Smirnov


def test_cycling_goes_by_the_steps_for_all_documents():
    law = Cycling([1, 2, 4])
    assert [law.sample(key(5, step), 0).item() for step in range(7)] == [1, 2, 4, 1, 2, 4, 1]
    assert law.sample(key(5, 2), 0, torch.full((5, 1), 9)).dtype == torch.int64


def test_numbers_are_their_own_law_and_slots_are_independent():
    assert sample(7, key(3), 0, torch.full((3, 1), 9)).tolist() == [[7]] * 3 and sample(0.3, key(3), 0).item() == 0.3
    first, second = (Uniform().sample(key(N), slot, torch.full((N, 1), 3)) for slot in (0, 1))
    assert abs((first == second).double().mean() - 1 / 3) < 4.5 * math.sqrt(2 / 9 / N)


@pytest.mark.parametrize("law", [Uniform, LogUniform])
@pytest.mark.parametrize(
    ("start", "ends"),
    [
        (0, {0.0: (0, 0), 0.25: (1, 10), 0.5: (1, 20), 1.0: (1, 40)}),
        (4, {0.0: (1, 4), 0.25: (1, 13), 0.5: (1, 22), 1.0: (1, 40)}),
        ((9, 80), {0.0: (9, 80), 0.5: (5, 60), 1.0: (1, 40)}),
    ],
)
def test_a_linear_curriculum_moves_the_range(law, start, ends):
    for progress, (low, high) in ends.items():
        drawn = integers(Linear(law(1, 40), start), k=at(progress))
        assert (drawn.min(), drawn.max()) == (low, high)
    real = reals(Linear(law(1 / 8, 8), start=[0.5, 2]), k=at(0.5))
    assert 0.3125 <= real.min() < 0.32 and 4.95 < real.max() <= 5
    assert torch.equal(integers(Linear(law(1, 40), start)), integers(law(1, 40))), "without a trainer it is at its end"


def test_a_step_curriculum_begins_with_true_positions():
    law = Uniform(1, 40)
    assert not integers(Step(law, until=0.3), k=at(0.29)).any() and (reals(Step(law), k=at(0.49)) == 1).all()
    assert torch.equal(integers(Step(law, until=0.3), k=at(0.3)), integers(law))
    assert torch.equal(reals(Step(law)), reals(law)), "without a trainer it is at its end"


@pytest.mark.parametrize(
    ("law", "most", "reach", "off_one"),
    [
        (Uniform(), 12, 12, 1.0),
        (LogUniform(1, 63), 12, 63, 1.0),
        (Discrete([1, 1, 4]), 12, 4, 1 / 3),
        (Step(Cycling([0.25, 0.5])), None, 1.0, 1.0),
        (Step(Discrete([1, 2, 3, 1])), None, 3, 0.5),
        (Linear(Uniform(1, 10), start=5000), 12, 5000, 1.0),
        (Linear(Uniform(), start=2), 12, 12, 1.0),
        (Linear(Uniform(0.5, 1), start=(0.5, 3)), None, 3, 1.0),
    ],
    ids=str,
)
def test_reach_and_share(law, most, reach, off_one):
    assert law.reach(most) == reach and share_off(law, 1) == off_one
    if most is not None:
        assert (Skip(skip=law).largest_skip(torch.tensor([most])) == reach).all()
        assert integers(law, most).max() <= reach


RECIPES = {
    "{law: uniform}": Uniform(),
    "{law: log-uniform, high: 65536}": LogUniform(1, 65536),
    "{law: discrete, values: [1, 8]}": Discrete([1, 8]),
    "{law: cycling, values: [1, 8]}": Cycling((1, 8)),
    "{law: log-uniform, high: 99, curriculum: step, until: 0.25}": Step(LogUniform(1, 99), until=0.25),
    "{law: discrete, values: [3], curriculum: step}": Step(Discrete([3])),
    "{curriculum: linear, start: 0}": Linear(Uniform(), start=0),
    "{law: uniform, low: 2, high: 9, curriculum: linear, start: [1, 4]}": Linear(Uniform(2, 9), start=(1, 4)),
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_names_a_law_and_a_record_writes_it_back(recipe):
    yaml = pytest.importorskip("yaml")
    view = Skip(skip=RECIPES[recipe])
    options = {"skip": yaml.safe_load(recipe)}
    assert resolve_view("skip", options) == view == resolve_method("skip", options)
    assert options == {"skip": yaml.safe_load(recipe)}, "what was given stays as it is"
    assert resolve_view("skip", json.loads(json.dumps(view.options()))) == view
    assert resolve_view("compose", {"views": [{"view": "skip", **options}]}).views == (view,)
    assert view.follows_progress == ("curriculum" in recipe)


@pytest.mark.parametrize(
    ("view", "options", "message"),
    [
        ("skip", {"skip": {"law": "log-unifrm"}}, "Unknown law 'log-unifrm'. Did you mean 'log-uniform'.*Known: cyc"),
        (
            "skip",
            {"skip": {"law": "uniform", "hihg": 3}},
            "Unknown option 'hihg' of law 'uniform'. Did you mean 'high'",
        ),
        ("skip", {"skip": {"curriculum": "cosine"}}, "Unknown curriculum 'cosine'. Known: linear, step"),
        (
            "skip",
            {"skip": {"curriculum": "step", "untill": 0.5}},
            "Unknown option 'untill' of law 'uniform' with curriculum 'step', which has until.",
        ),
        ("skip", {"skip": {"curriculum": "linear"}}, "with curriculum 'linear', which has start needs start"),
        ("skip", {"skip": {"law": "discrete"}}, "law 'discrete' needs values"),
        ("skip", {"skip": {"law": "discrete", "values": []}}, "law 'discrete': values must be a list .* got \\[\\]"),
        ("skip", {"skip": {"law": "uniform", "low": 2, "high": 1}}, "low must not exceed high, got low=2 and high=1"),
        ("skip", {"skip": {"law": "uniform", "high": "9"}}, "law 'uniform': an option of .* has a wrong type"),
        ("skip", {"skip": {"law": "log-uniform", "low": 0}}, "law 'log-uniform': low must be above 0, got 0"),
        (
            "skip",
            {"skip": {"law": "discrete", "values": [3], "curriculum": "linear", "start": 0}},
            "curriculum 'linear' moves a range, of Uniform or LogUniform, got law=Discrete",
        ),
        (
            "skip",
            {"skip": {"curriculum": "linear", "start": [2]}},
            "start must be a number or \\[low, high\\]",
        ),
        (
            "skip",
            {"skip": {"curriculum": "step", "until": 1}},
            "curriculum 'step': until must be a number above 0 and below 1",
        ),
        ("skip", {"skip": {"high": 9}}, "skip must be an integer or a law, such as Uniform\\(1, 4096\\), in a recipe"),
        ("skip", {"split": True}, "split must be an integer of at least 0 .*, got True"),
        ("skip", {"skip": {"law": "uniform", "high": 1.5}}, "view 'skip': skip must be an integer of .*, got 1.5"),
        ("skip", {"skip": {"law": "uniform", "high": 2**25}}, "skip must be an integer of at .*, got 33554432"),
        (
            "skip",
            {"split": {"law": "uniform", "low": -1}},
            "view 'skip': split must be an integer of at least 0 .*, got -1",
        ),
        ("posaug", {"alpha": {"law": "uniform"}}, "view 'posaug': alpha needs a law with a largest number, `high`"),
        (
            "posaug",
            {"alpha": {"law": "uniform", "low": 0, "high": 8}},
            "alpha must be a number above 0, got 0",
        ),
        ("posaug", {"alpha": float("nan")}, "alpha must be a number above 0, got nan"),
        ("dilation", {"factor": "a"}, "view 'dilation': factor must be a number above 0, got 'a'"),
        (
            "random-base",
            {"factor": {"law": "uniform", "high": 8, "curriculum": "linear", "start": 0}},
            "view 'random-base': factor must be a number above 0, got 0",
        ),
    ],
)
def test_what_is_no_law_or_none_of_the_view_is_said(view, options, message):
    with pytest.raises(ValueError, match=message):
        resolve_view(view, options)
