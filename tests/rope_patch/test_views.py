import math

import pytest
import torch

from rope_patch.draws import DrawKey
from rope_patch.views import VIEWS, ChunkPermute, Compose, Cyclic, Dilation, NoPE, PosAug, Skip, Standard

L = 12


def key(samples=1, step=0):
    return DrawKey(0, torch.tensor(step), torch.arange(samples)[:, None])


def drawn(view, samples=2000, length=L):
    return view.draw(torch.full((samples, 1), length), key(samples))


def index(view, length=L, t=None):
    parameters = view.draw(torch.tensor([[length]]), key())
    return view.rope_index(torch.arange(length)[None] if t is None else t, parameters)[0].tolist()


def test_fixed_views_follow_their_formulas():
    t = range(L)
    assert index(Standard()) == list(t)
    assert index(Skip(split=5, skip=100)) == [i if i < 5 else i + 100 for i in t]
    assert index(Skip(split=5, skip=-L)) == [i if i < 5 else i - L for i in t]
    assert index(Cyclic(shift=4)) == [(i + 4) % L for i in t]
    assert index(Dilation(low=1.5, high=1.5)) == [1.5 * i for i in t]
    assert index(PosAug(low=0.3, high=0.3)) == [0.3 * i for i in t]  # float64: no rounding of its own
    assert index(NoPE()) == [0] * L
    assert index(Compose([Skip(split=5, skip=7), Dilation(low=0.5, high=0.5)])) == [
        0.5 * (i if i < 5 else i + 7) for i in t
    ]


def test_skip_draws_the_split_in_the_document_and_the_skip_up_to_its_length():
    parameters = drawn(Skip())
    assert set(parameters["split"].flatten().tolist()) == set(range(L))
    assert set(parameters["skip"].flatten().tolist()) == set(range(1, L + 1))
    # independent draws: all combinations turn up
    pairs = torch.stack([parameters["split"], parameters["skip"]]).flatten(1).T.unique(dim=0)
    assert len(pairs) == L * L
    assert drawn(Skip(max_skip=3))["skip"].max() == 3


def test_cyclic_draws_every_shift_of_the_document():
    assert set(drawn(Cyclic())["shift"].flatten().tolist()) == set(range(L))


def test_cyclic_is_the_skip_of_minus_length_up_to_a_constant():
    turned = torch.tensor(index(Cyclic(shift=4)))
    skipped = torch.tensor(index(Skip(split=L - 4, skip=-L)))
    assert (turned - skipped).unique().tolist() == [4]


def test_cyclic_goes_on_after_the_suffix_when_decoding():
    assert index(Cyclic(shift=4), t=torch.arange(L, L + 3)[None]) == [4, 5, 6]


@pytest.mark.parametrize(("length", "blocks"), [(12, 3), (13, 4), (5, 8), (1, 2), (9, 8)])
def test_chunk_permute_moves_whole_blocks(length, blocks):
    chunk = -(-length // blocks)
    n_blocks = -(-length // chunk)
    for step in range(20):
        parameters = ChunkPermute(blocks=blocks).draw(torch.tensor([[length]]), key(step=step))
        t = torch.arange(length + 3)[None]
        r = ChunkPermute(blocks=blocks).rope_index(t, parameters)[0].tolist()
        places = [r[b * chunk] // chunk for b in range(n_blocks)]
        assert sorted(places) == list(range(n_blocks))
        assert r[:length] == [chunk * places[i // chunk] + i % chunk for i in range(length)]
        assert r[length:] == [length, length + 1, length + 2], "what is decoded behind the document keeps its place"


def test_chunk_permute_draws_every_permutation_equally_often():
    parameters = drawn(ChunkPermute(blocks=3), samples=6000)
    orders = torch.cat([parameters[f"block_{b}"] for b in range(3)], 1)
    _, counts = orders.unique(dim=0, return_counts=True)
    assert len(counts) == 6 and (counts - 1000).abs().max() < 4 * math.sqrt(6000 * (1 / 6) * (5 / 6))


def test_dilation_draws_one_factor_a_document_and_posaug_one_a_step():
    assert drawn(Dilation())["factor"].shape == (2000, 1)
    assert 0.5 <= drawn(Dilation())["factor"].min() < 0.52 and 1.98 < drawn(Dilation())["factor"].max() <= 2
    assert drawn(PosAug())["alpha"].shape == ()


@pytest.mark.parametrize(("law", "below_one"), [("uniform", (1 - 1 / 8) / (8 - 1 / 8)), ("log-uniform", 0.5)])
def test_posaug_laws(law, below_one):
    view = PosAug(law=law)
    alphas = torch.stack([view.draw(torch.tensor([[L]]), key(step=s))["alpha"] for s in range(3000)])
    assert alphas.min() >= 1 / 8 and alphas.max() <= 8
    assert abs((alphas < 1).double().mean() - below_one) < 4 * math.sqrt(below_one * (1 - below_one) / 3000)


def test_composed_views_draw_independently():
    parameters = drawn(Compose([Skip(), Skip()]))
    assert not torch.equal(parameters["0.split"], parameters["1.split"])


def test_compose_takes_the_dictionaries_of_a_recipe():
    view = Compose([{"view": "skip", "max_skip": 3}, PosAug()])
    assert view == Compose([Skip(max_skip=3), PosAug()])
    assert not Compose([Standard()]).perturbs and view.perturbs


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Skip(split=-1), "view 'skip': split must be at least 0, got -1."),
        (lambda: Skip(split=1.5), "view 'skip': split must be an integer or None, got 1.5."),
        (lambda: Skip(skip=2**25), "skip must be in \\[-16777216, 16777216\\], got 33554432"),
        (lambda: Skip(max_skip=0), "max_skip must be at least 1, got 0."),
        (lambda: Skip(skip=3, max_skip=3), "give skip or max_skip, not both"),
        (lambda: Cyclic(shift=-2), "view 'cyclic': shift must be at least 0, got -2."),
        (lambda: ChunkPermute(blocks=1), "view 'chunk-permute': blocks must be at least 2, got 1."),
        (lambda: Dilation(low=0), "view 'dilation': low must be a finite number above 0, got 0."),
        (lambda: PosAug(low=2, high=1), "view 'posaug': low must not exceed high, got low=2 and high=1."),
        (lambda: PosAug(high=float("inf")), "high must be a finite number above 0, got inf."),
        (lambda: PosAug(law="normal"), "law must be one of \\('uniform', 'log-uniform'\\), got 'normal'."),
        (lambda: Compose([]), "views must be a list of at least one view, got \\[\\]."),
        (lambda: Compose(["skip"]), "views must hold views such as Skip\\(\\), got 'skip'."),
        (lambda: VIEWS["skp"], "Unknown view 'skp'. Did you mean 'skip'\\? Known: chunk-permute, compose"),
        (
            lambda: Skip(split=L).check_length(L),
            "split must be below the number of tokens in the sequence, got split=12",
        ),
        (lambda: Cyclic(shift=L).check_length(L), "shift must be below the number of tokens in the sequence"),
        (lambda: PosAug(high=8).check_length(2**22), "RoPE indices would reach 33554424; at most 16777216"),
        (lambda: Skip().check_length(2**24), "RoPE indices would reach 33554431"),
    ],
)
def test_what_a_view_cannot_do_is_said(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_second_claim_on_a_name_is_refused():
    with pytest.raises(ValueError, match="view 'skip' is already registered, as Skip."):
        VIEWS.register("skip")(Standard)
