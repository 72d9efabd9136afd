"""What every view promises, for random options and compositions: draws by document alone, s by its definition."""

import json
import math
from dataclasses import MISSING, fields

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from support.gathered import gathered
from support.views import PAD, built, maybe

from rope_patch.base.draws import DrawKey
from rope_patch.forward.drawn_view import Batch
from rope_patch.forward.sources import ViewSource
from rope_patch.layout.documents import Documents
from rope_patch.methods import resolve_view
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

N_LAYERS = 3
LONGEST = 14
CPU = torch.device("cpu")

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
LAYOUTS = ("right", "right, positions", "left", "left, positions", "left, positions 1", "packed", "packed, padded")


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


def laid_out(documents, layout):
    """Keyword arguments of a decoder for a batch of documents, and (row, first token) of each."""
    if layout.startswith("packed"):
        ids = [token for ids in documents for token in ids]
        positions = [t for ids in documents for t in range(len(ids))]
        begins = [sum(map(len, documents[:i])) for i in range(len(documents))]
        mask = None
        if layout == "packed, padded":
            mask = torch.tensor([[1] * len(ids) + [0] * 3])
            ids, positions = ids + [PAD] * 3, positions + [positions[-1]] * 3
        inputs = {"ids": torch.tensor([ids]), "position_ids": torch.tensor([positions]), "attention_mask": mask}
        return inputs, [(0, begin) for begin in begins]
    width = max(map(len, documents)) + 2
    ids, mask = torch.full((len(documents), width), PAD), torch.zeros(len(documents), width, dtype=torch.long)
    places = []
    for row, document in enumerate(documents):
        begin = width - len(document) if "left" in layout else 0
        ids[row, begin : begin + len(document)] = torch.tensor(document)
        mask[row, begin : begin + len(document)] = 1
        places.append((row, begin))
    positions = None
    if "positions" in layout:
        positions = (mask.cumsum(1) - 1).clamp(min=0)
    if layout == "left, positions 1":
        positions = positions.masked_fill(mask == 0, 1)
    return {"ids": ids, "position_ids": positions, "attention_mask": mask}, places


def bound(view, batch, first=0, step=0, progress=1.0):
    """What a forward of the batch draws, whose first document is number `first` of its step."""
    source = ViewSource(view, seed=11)
    source.clock.set(step, first, progress)
    rows, seq_len = batch["ids"].shape
    return source.bind(Batch(rows, seq_len, CPU, batch["position_ids"], batch["attention_mask"], 0, True, batch["ids"]))


def where_tokens_are(batch):
    """t of each token, -1 on padding."""
    rows, seq_len = batch["ids"].shape
    mask = batch["attention_mask"]
    if batch["position_ids"] is None:
        t = mask.cumsum(1) - 1
    else:
        t = batch["position_ids"].expand(rows, seq_len)
    return t if mask is None else t.masked_fill(mask == 0, -1)


def moved(view, documents, layout, step=0, progress=1.0, first=0):
    """r(t) - r(0) of each document in each layer, and what the view says of s."""
    batch, places = laid_out(documents, layout)
    drawn = bound(view, batch, first, step, progress)
    position_ids = batch["position_ids"]
    if position_ids is None:
        position_ids = torch.arange(batch["ids"].shape[1])[None]
    layers = [own(position_ids).expand(batch["ids"].shape) for _, own in drawn.by_layer(N_LAYERS)]
    index = [[r[row, begin : begin + len(ids)] for r in layers]
             for (row, begin), ids in zip(places, documents, strict=True)]  # fmt: skip
    index = [[(r - r[0]).tolist() for r in own] for own in index]
    first = drawn.affected_from(where_tokens_are(batch), N_LAYERS).expand(batch["ids"].shape)
    factor = drawn.parameters.get("base_factor")
    return index, [int(first[place]) for place in places], None if factor is None else factor.item()


def by_definition(index, factor):
    """min{t : r(t) - r(0) != t} over the layers, or the length."""
    n = len(index[0])
    if factor not in (None, 1.0):  # of angles, not of indices
        return min(1, n)
    return min(next((t for t in range(n) if r[t] != t), n) for r in index)


def fits(view, documents):
    """Whether the longest document may be viewed so; as a forward does, refuses what it may not."""
    try:
        view.check_length(max(map(len, documents)))
        if view.layerwise:
            view.check_layers(N_LAYERS)
    except ValueError:
        return False
    return True


@each_view
@few
@given(data=st.data(), documents=texts, layout=st.sampled_from(LAYOUTS), progress=st.sampled_from([0.0, 0.5, 1.0]))
def test_a_document_is_drawn_for_as_if_it_were_alone(name, data, documents, layout, progress):
    view = data.draw(REGISTERED[name])
    assume(fits(view, documents))
    before = data.draw(st.integers(0, 2))
    index, first, factor = moved(view, documents, layout, 5, progress, before)
    for i, ids in enumerate(documents):
        if not fits(view, [ids]):
            continue  # a fixed split or shift beyond its end, which is refused where no document is longer
        alone, own_first, own_factor = moved(view, [ids], "packed", 5, progress, before + i)
        for actual, expected in zip(index[i], alone[0], strict=True):
            assert actual == pytest.approx(expected, rel=0, abs=1e-9), "but for the rounding of where a row begins"
        assert first[i] == own_first[0] and factor == own_factor


@each_view
@few
@given(
    data=st.data(),
    documents=texts,
    layout=st.sampled_from(LAYOUTS),
    progress=st.sampled_from([0.0, 0.5, 1.0]),
    step=st.integers(0, 99),
)
def test_the_first_changed_token_is_that_of_the_definition(name, data, documents, layout, progress, step):
    view = data.draw(REGISTERED[name])
    assume(fits(view, documents))
    index, first, factor = moved(view, documents, layout, step, progress)
    assert first == [by_definition(of_layer, factor) for of_layer in index]


@each_view
@few
@given(data=st.data())
def test_a_document_that_no_draw_can_change_is_known(name, data):
    """And the other way round: of 125 draws for one that can be changed some do; all tokens end sentences and cues."""
    view = data.draw(REGISTERED[name])
    length = data.draw(st.integers(1, LONGEST))
    assume(fits(view, [[PAD] * length]))
    can = view.can_change(torch.tensor([length]))
    assert can.dtype == torch.bool and can.shape == (1,)
    draws = [moved(view, [[PAD] * length] * 25, "packed", step)[1] for step in range(5)]
    some = any(s < length for first in draws for s in first)
    assert not some or can.item()
    if view.name not in ("compose", "per-layer", "endprompt", "mix"):  # which may cancel, or look for another cue
        assert some == can.item()


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
    assert resolve_view(view.name, json.loads(json.dumps(view.options()))) == view


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
