"""What every view promises, for random options and compositions: draws by document alone, s by its definition."""

import math
from dataclasses import MISSING, fields

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from support.gathered import gathered
from support.views import built, maybe

from rope_patch.base.draws import DrawKey
from rope_patch.layout.documents import Documents
from rope_patch.testing.models import PAD, WHOLE
from rope_patch.testing.views import check_can_change, check_draws, check_first_changed, check_options, fits, moved
from rope_patch.views import (
    RPE,
    VIEWS,
    Compose,
    Cyclic,
    Dilation,
    Discrete,
    EndPrompt,
    Linear,
    Mix,
    NoPE,
    PerLayer,
    PosAug,
    RandomBase,
    Skip,
    Standard,
    Uniform,
)

LONGEST = 14

few = settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))

# no part of another view: they change nothing, leave nothing to change, or rescale frequencies
ALONE = ("standard", "nope", "random-base")
STRATEGIES = gathered(VIEWS, "STRATEGIES")


def strategies(farthest):
    """Views of every registered name, with windows of a length from `farthest`."""
    single = {name: strategy(farthest) for name, strategy in STRATEGIES.items()}
    plain = [strategy for name, strategy in single.items() if name not in ALONE]
    composed = built(Compose, views=st.lists(st.one_of(*plain), min_size=1, max_size=3))
    part = st.one_of(st.just(Standard()), st.just(NoPE()), composed, *plain)
    return {
        **single,
        "mix": built(
            Mix,
            views=st.lists(part, min_size=2, max_size=3),
            shares=maybe(st.sampled_from([(0.25, 0.75), (0.5, 0.5), (0.2, 0.3, 0.5)])),
        ),
        "compose": composed,
        "per-layer": built(
            PerLayer,
            view=st.one_of(*plain, composed),
            layers=maybe(st.sampled_from(["bottom", "top", "independent"]) | st.lists(st.integers(0, 2), min_size=1)),
        ),
    }


REGISTERED = strategies(st.integers(LONGEST, 60))
each_view = pytest.mark.parametrize("name", REGISTERED)

tokens = st.integers(3, 6)
texts = st.lists(st.lists(tokens, min_size=1, max_size=LONGEST), min_size=1, max_size=4)


def test_every_view_is_here():
    lacking = [lines_to_add(VIEWS[name]) for name in VIEWS if name not in REGISTERED]
    assert not lacking, "\n".join(lacking)


def lines_to_add(cls):
    """To the test file of a view, for those who add one; a view made of others goes into `strategies` above."""
    stem = cls.__module__.rpartition(".")[2]
    options = ", ".join(f"{f.name}=..." for f in fields(cls) if f.init)
    return (
        f"Add to tests/rope_patch/views/test_{stem}.py what its options may be, as random strategies (hypothesis):\n"
        "from hypothesis import strategies as st\n"
        "from support.views import built\n"
        f'STRATEGIES = {{"{cls.name}": lambda farthest: built({cls.__name__}, {options})}}'
    )


@each_view
@few
@given(data=st.data(), documents=texts, layout=st.sampled_from(WHOLE), progress=st.sampled_from([0.0, 0.5, 1.0]))
def test_a_document_is_drawn_for_as_if_it_were_alone(name, data, documents, layout, progress):
    view = data.draw(REGISTERED[name])
    assume(fits(view, documents))
    before = data.draw(st.integers(0, 2))
    check_draws(view, documents, layout, progress=progress, before=before)


@each_view
@few
@given(
    data=st.data(),
    documents=texts,
    layout=st.sampled_from(WHOLE),
    progress=st.sampled_from([0.0, 0.5, 1.0]),
    step=st.integers(0, 99),
)
def test_the_first_changed_token_is_that_of_the_definition(name, data, documents, layout, progress, step):
    view = data.draw(REGISTERED[name])
    assume(fits(view, documents))
    check_first_changed(view, documents, layout, step=step, progress=progress)


@each_view
@few
@given(data=st.data())
def test_a_document_that_no_draw_can_change_is_known(name, data):
    """And the other way round: of 125 draws for one that can be changed some do; all tokens end sentences and cues."""
    view = data.draw(REGISTERED[name])
    length = data.draw(st.integers(1, LONGEST))
    assume(fits(view, [[PAD] * length]))
    changed = check_can_change(view, length)
    if view.name not in ("compose", "per-layer", "endprompt", "mix"):  # which may cancel, or look for another cue
        assert changed == view.can_change(torch.tensor([length])).item()


@pytest.mark.parametrize(
    ("view", "shortest"),
    [
        (Skip(split=20), 21),
        (Skip(), 2),
        (Cyclic(shift=20), 1),
        (EndPrompt(target=40, cue_tokens=6), 7),
        (EndPrompt(target=40, cue_tokens=[[5] * 7, [6] * 3]), 4),
        (EndPrompt(target=40, cue_tokens=0), None),
        (Compose([Skip(split=20), Skip(split=9)]), 10),
        (PerLayer(Skip(split=20), "top"), 21),
        (Mix([Skip(split=20), Skip(split=9), Standard()]), 10),
        (Standard(), None),
    ],
    ids=str,
)
def test_from_how_many_tokens_on_a_document_can_be_changed(view, shortest):
    length = torch.arange(1, 39).view(2, 19)
    can = view.can_change(length)
    if view == Cyclic(shift=20):  # a shorter document turns by the remainder
        assert torch.equal(can, 20 % length != 0)
    else:
        assert torch.equal(can, length >= (99 if shortest is None else shortest))


@few
@given(view=st.one_of(*REGISTERED.values()))
def test_options_make_an_equal_view(view):
    check_options(view)


FAR = strategies(st.integers(250, 400))
VARIED = [[PAD] * 200, [4, 5, PAD, 6, PAD] * 18, [4] * 50 + [5, PAD, PAD], [4] * 30 + [6], [5] * 9 + [4, PAD]]


def draws_of(view):
    """Index rows at several steps and points of training, of documents of several lengths and ends."""
    return [moved(view, VARIED, "packed", step, p, 5 * step) for step in range(4) for p in (0.1, 0.4, 0.9)]


@each_view
@settings(few, max_examples=4)
@given(data=st.data())
def test_every_option_that_is_accepted_changes_what_is_drawn(name, data):
    """Leaving one out gives another view, or is refused."""
    view = data.draw(FAR[name])
    options = {field.name: getattr(view, field.name) for field in fields(view)}
    for field in fields(view):
        if field.default is MISSING or options[field.name] == field.default:
            continue
        try:
            other = type(view)(**{n: value for n, value in options.items() if n != field.name})
        except ValueError:
            continue
        if other != view:
            assert draws_of(view) != draws_of(other), f"{field.name} of {view} says nothing"


@pytest.mark.parametrize(
    "view",
    [
        Skip(),
        Skip(split=4),
        Skip(skip=-3),
        Skip(skip=Linear(Uniform(1), start=2)),
        Cyclic(),
        Cyclic(shift=5),
        Dilation(),
        NoPE(),
        PosAug(),
        PosAug(Discrete([1, 2, 4, 8])),
        PosAug(Discrete([1, 1, 4]), granularity="sample"),
        RandomBase(),
        RPE(max_index=11),
        RPE(max_index=14, granularity="sample"),
        RPE(max_index=9, values="floats"),
        Mix([Standard(), Skip(), Skip(split=4)], [0.2, 0.5, 0.3]),
    ],
    ids=str,
)
def test_how_often_a_token_lies_behind_the_first_changed_one(view):
    n, samples = 9, 4000
    length, ordinal = torch.full((samples, 1), n), torch.arange(samples)[:, None]
    documents, t = Documents(torch.zeros_like(length), length, ordinal), torch.arange(n)[None]
    key = DrawKey(1, ordinal, ordinal)  # each document in a step of its own, whose draws its documents may share
    behind = (t >= view.affected_from(t, documents, view.draw(length, key))).double().mean(0)
    share = view.affected_share(t, torch.tensor([[n]]))[0]
    assert (behind - share).abs().max() < 4.5 * math.sqrt(0.25 / samples)


def test_rpe_is_as_likely_whatever_shares_the_step():
    """Short documents reach all of the range, and those of one length share a step's sample."""
    view, steps = RPE(max_index=20), 2000
    length = torch.tensor([[5], [14], [5]]).repeat(steps, 1)
    step, ordinal = torch.arange(steps).repeat_interleave(3)[:, None], torch.arange(3).repeat(steps)[:, None]
    index = view.rope_index(torch.arange(5)[None], view.draw(length, DrawKey(11, step, ordinal))).view(steps, 3, 5)
    assert torch.equal(index[:, 0], index[:, 2]) and not torch.equal(index[:, 0], index[:, 1])
    share = index[:, 0].flatten().bincount(minlength=20) / steps
    assert (share - 5 / 20).abs().max() < 4.5 * math.sqrt(0.25 * 0.75 / steps)
