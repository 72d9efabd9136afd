import math
from dataclasses import replace

import pytest
import torch

from rope_patch.draws import DrawKey
from rope_patch.layout.documents import Documents
from rope_patch.views import (
    RPE,
    VIEWS,
    ChunkPermute,
    Compose,
    Cream,
    Cyclic,
    Dilation,
    EndPrompt,
    Mix,
    NoPE,
    PerLayer,
    PosAug,
    PoSE,
    RandomBase,
    Skip,
    Standard,
)

L = 12


def key(samples=1, step=0):
    return DrawKey(0, torch.tensor(step), torch.arange(samples)[:, None])


def drawn(view, samples=2000, length=L):
    return view.draw(torch.full((samples, 1), length), key(samples))


def index(view, length=L, t=None):
    parameters = view.draw(torch.tensor([[length]]), key())
    return view.rope_index(torch.arange(length)[None] if t is None else t, parameters)[0].tolist()


def first_changed(view, parameters, length):
    """s of documents of [samples, 1] lengths, one a row."""
    documents = Documents(torch.zeros_like(length), length, torch.arange(len(length))[:, None])
    return view.affected_from(torch.arange(int(length.max()))[None], documents, parameters)


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
        alphas = torch.stack(alphas_of(view, steps=range(3000), progress=progress))
        assert low <= alphas.min() < low + 0.1 and high - 0.1 < alphas.max() <= high
    view = PosAug(curriculum="step", until=0.25, law="log-uniform")
    assert all(a == 1 for a in alphas_of(view, progress=0.2))
    assert all(a != 1 for a in alphas_of(view, progress=0.25))
    # without a trainer training is at its end
    assert alphas_of(view) == alphas_of(PosAug(law="log-uniform"))


def test_rpe_is_a_sorted_sample_without_repeats():
    view = RPE(max_index=20)
    rows = torch.stack([
        view.rope_index(torch.arange(L), view.draw(torch.full((3, 1), L), key(3, step)))[0] for step in range(1500)
    ])  # fmt: skip
    assert (rows.diff(dim=1) > 0).all() and rows.min() == 0 and rows.max() == 19
    chosen = torch.zeros(1500, 20).scatter_(1, rows, 1.0).mean(0)
    assert (chosen - L / 20).abs().max() < 4 * math.sqrt(0.6 * 0.4 / 1500), "each index is as likely"
    both = torch.zeros(1500, 20).scatter_(1, rows, 1.0)
    pairs = (both.T @ both / 1500)[~torch.eye(20, dtype=torch.bool)]
    assert (pairs - L * (L - 1) / (20 * 19)).abs().max() < 5 * math.sqrt(0.35 * 0.65 / 1500), "and each pair"


def test_rpe_is_shared_by_a_step_or_drawn_for_each_document():
    t = torch.arange(L)
    shared = RPE(max_index=50)
    rows = shared.rope_index(t, shared.draw(torch.full((4, 1), L), key(4)))
    assert all(torch.equal(row, rows[0]) for row in rows)
    apart = RPE(max_index=50, granularity="sample")
    parameters = apart.draw(torch.full((4, 1), L), key(4))
    rows = apart.rope_index(t, parameters)
    assert len({tuple(row) for row in rows.tolist()}) == 4 and (rows.diff(dim=1) > 0).all()
    # packed: one value a token, the same draws
    sample = torch.arange(4).repeat_interleave(L)[None]
    packed = apart.draw(torch.full((1, 4 * L), L), DrawKey(0, torch.tensor(0), sample))
    assert torch.equal(apart.rope_index(t.repeat(4)[None], packed).view(4, L), rows)
    # tokens that are decoded later follow on
    assert apart.rope_index(torch.tensor([[L - 1, L, L + 1]]), parameters).diff(dim=1).tolist() == [[1, 1]] * 4


def test_endprompt_puts_the_last_tokens_at_the_end_of_the_target():
    assert index(EndPrompt(target=100, cue_tokens=3)) == [*range(9), 97, 98, 99]
    assert index(EndPrompt(target=100, cue_tokens=0)) == list(range(L))
    assert index(EndPrompt(target=100, cue_tokens=L)) == list(range(L)), "no body"
    view = EndPrompt(target=100, cue_tokens=3, placement="random")
    parameters = drawn(view)
    first = parameters["split"] + parameters["skip"]
    assert (parameters["split"] == 9).all() and first.min() == 9 and first.max() == 97
    assert torch.equal(first_changed(view, parameters, torch.full((2000, 1), L)) == 9, parameters["skip"] > 0)


@pytest.mark.parametrize("chunks", [2, 3, 5])
def test_pose_moves_chunks_apart(chunks):
    view, n, target = PoSE(target=60, chunks=chunks), 20, 60
    length = torch.full((3000, 1), n)
    parameters = view.draw(length, key(3000))
    rows = view.rope_index(torch.arange(n), parameters)
    gaps = rows.diff(dim=1)
    assert (rows[:, 0] == 0).all() and (gaps >= 1).all() and rows.max() == target - 1
    assert (gaps > 1).sum(1).max() == chunks - 1
    assert torch.equal(rows - torch.arange(n) != 0, torch.arange(n) >= first_changed(view, parameters, length))
    if chunks == 2:
        border, skip = parameters["_border_1"], parameters["skip_1"]
        assert border.unique().tolist() == list(range(1, 11)) and skip.unique().tolist() == list(range(41))
        assert abs(border.double().mean() - 5.5) < 0.2 and abs(skip.double().mean() - 20) < 0.8


@pytest.mark.parametrize("chunks", [2, 4])
def test_pose_keeps_a_window_of_long_documents(chunks):
    view = PoSE(target=60, window=10, chunks=chunks)
    length = torch.tensor([[30], [10], [4], [11]])
    content = view.cut(length, key(4))
    assert content.shape == (4, 10) and (content.diff(dim=1) >= 1).all()
    assert content[1].tolist() == list(range(10)) and content[2, :4].tolist() == list(range(4))
    assert content[3].max() <= 10 and content[0].max() <= 29
    many = view.cut(torch.full((2000, 1), 30), key(2000))
    assert many.max() == 29 and (many[:, 0] == 0).all(), "the first chunk is the beginning"
    # its chunks are those whose positions are then moved
    parameters = view.draw(torch.full((2000, 1), 10), key(2000))
    borders = torch.cat([parameters[f"_border_{i}"] for i in range(1, chunks)], 1)
    jumps = many.diff(dim=1) > 1
    assert all(
        set((row.nonzero().flatten() + 1).tolist()) <= set(b.tolist()) for row, b in zip(jumps, borders, strict=True)
    )
    assert view.cut(torch.tensor([[10], [3]]), key(2)) is None and PoSE(target=60).cut(length, key(4)) is None


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
        (lambda: Skip(split=-1), "view 'skip': split must be at least 0, got -1."),
        (lambda: Skip(split=1.5), "view 'skip': split must be an integer or None, got 1.5."),
        (lambda: Skip(skip=2**25), "skip must be in \\[-16777216, 16777216\\], got 33554432"),
        (lambda: Skip(max_skip=0), "max_skip must be at least 1, got 0."),
        (lambda: Skip(skip=3, max_skip=3), "give skip or max_skip, not both"),
        (lambda: Cyclic(shift=-2), "view 'cyclic': shift must be at least 0, got -2."),
        (lambda: ChunkPermute(blocks=1), "view 'chunk-permute': blocks must be at least 2, got 1."),
        (lambda: Dilation(low=0), "view 'dilation': low must be a finite number above 0, .* got 0."),
        (lambda: PosAug(low=2, high=1), "view 'posaug': low must not exceed high, got low=2 and high=1."),
        (lambda: PosAug(high=float("inf")), "high must be a finite number above 0, .* got inf."),
        (lambda: Skip(split=0), "view 'skip': split must be at least 1 or None, got 0"),
        (lambda: Skip(skip=0), "skip=0 moves nothing"),
        (lambda: Skip(start=3), "start is read with a curriculum alone, got start=3: leave it out"),
        (lambda: Skip(curriculum="linear", until=0.5), "until is read with curriculum='step' alone"),
        (lambda: Skip(law="log-uniform", max_skip=1), "law='log-uniform' says nothing where max_skip=1"),
        (
            lambda: Skip(curriculum="step", start=8, max_skip=8),
            "goes from start=8 to an equal max_skip",
        ),
        (lambda: Skip(curriculum="step", until="half"), "until must be in \\(0, 1\\), got 'half'"),
        (lambda: Skip(split=True), "split must be an integer or None, got True"),
        (lambda: Cyclic(shift=0), "shift=0 turns nothing"),
        (lambda: Dilation(low=1, high=1), "low=1 and high=1 stretch nothing"),
        (lambda: Dilation(low="a"), "low must be a finite number above 0, .*got 'a'"),
        (lambda: Dilation(low=1e-320), "low must be a finite number above 0, from 2\\*\\*-24"),
        (lambda: RandomBase(low=1.0, high=1.0), "low=1 and high=1 keep the base"),
        (lambda: RandomBase(low=2, high=2, law="log-uniform"), "law='log-uniform' says nothing where low and high are"),
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
        (lambda: Cream(target=9, law="uniform", sigma=3), "sigma is read with law='gaussian' alone, got sigma=3"),
        (lambda: Cream(target=9, sigma="3"), "sigma must be a finite number above 0, .*got '3'"),
        (lambda: EndPrompt(target=9, cue_tokens=0, placement="random"), "cue_tokens=0 is the control without one"),
        (lambda: EndPrompt(target=9, cue_tokens=True), "cue_tokens must be an integer or None, got True"),
        (lambda: Compose([Skip(), Standard()]), "Standard\\(\\) changes nothing: leave it out"),
        (lambda: Compose([Skip(), NoPE()]), "view 'nope' leaves no distances that the others could change"),
        (lambda: Compose([Dilation(), RPE()]), "view 'rpe' goes by the index of a token, so it must come first"),
        (lambda: PosAug(law="normal"), "law must be one of \\('uniform', .*\\), got 'normal'."),
        (lambda: PosAug(granularity="row"), "granularity must be one of"),
        (lambda: PosAug(curriculum="cosine"), "curriculum must be one of"),
        (lambda: PosAug(law="discrete", values=[]), "values must hold at least one alpha"),
        (lambda: PosAug(curriculum="linear", start=[2.0]), "start must be"),
        (lambda: PosAug(curriculum="step", until=1.0), "until must be in"),
        (lambda: PosAug(law="cycling", granularity="sample"), "'cycling' goes by steps, got granularity='sample'"),
        (lambda: PosAug(law="discrete", curriculum="linear"), "curriculum 'linear' moves a range"),
        (lambda: PosAug(law="discrete", values=[64.0]).check_length(2**19), "RoPE indices would reach"),
        (lambda: EndPrompt(target=1, cue_tokens=1), "target must be at least 2, got 1"),
        (lambda: EndPrompt(target=9, cue_tokens=-1), "cue_tokens must be at least 0, got -1"),
        (lambda: EndPrompt(target=9, cue_tokens=[[3], [3]]), "different cues as lists of one or more token ids"),
        (lambda: EndPrompt(target=9, cue_tokens=[[3], []]), "different cues as lists of one or more token ids"),
        (lambda: EndPrompt(target=9, cue_tokens=[3, 4]), "different cues as lists of one or more token ids"),
        (lambda: EndPrompt(target=9, cue_tokens="word"), "different cues as lists of one or more token ids"),
        (lambda: EndPrompt(target=9, cue_tokens=1, placement="start"), "placement must be one of"),
        (lambda: EndPrompt(target=9, cue_tokens=1).check_length(10), "documents of 10 tokens reach beyond target=9"),
        (lambda: PoSE(target=1), "target must be at least 2, got 1"),
        (lambda: PoSE(target=9, chunks=1), "chunks must be at least 2, got 1"),
        (lambda: PoSE(target=9, window=10), "window must not exceed target=9, got 10"),
        (lambda: PoSE(target=90, window=9).check_length(10), "documents of 10 tokens must be cut to window=9 first"),
        (lambda: PoSE(target=9).check_length(10), "documents of 10 tokens reach beyond target=9"),
        (lambda: RPE(max_index=1), "max_index must be at least 2, got 1"),
        (lambda: RPE(granularity="layer"), "granularity must be one of"),
        (lambda: RPE(max_index=16).check_length(17), "documents of 17 tokens have no 17 different indices below"),
        (lambda: Compose([]), "views must be a list of at least one view, got \\[\\]."),
        (lambda: Compose([3]), "view 'compose' takes views such as Skip\\(.* or a name, got 3."),
        (lambda: Compose(["skp"]), "Unknown view 'skp'. Did you mean 'skip'"),
        (lambda: Compose([Mix([Skip(), Standard()])]), "view 'compose': .* stands alone, and so does 'mix'"),
        (lambda: PerLayer(Mix([Skip(), Standard()]), "top"), "view 'per-layer': .* stands alone, and so does 'mix'"),
        (lambda: Mix([Skip()]), "views must be a list of at least two views, got \\[Skip"),
        (lambda: Mix("skip"), "views must be a list of at least two views, got 'skip'"),
        (lambda: Mix([Skip(), Mix([Skip(), Standard()])]), "stands alone, as another mix does"),
        (lambda: Mix([Skip(), PerLayer(Skip(), "top")]), "a view that differs by layer or rescales frequencies stands"),
        (lambda: Mix([Skip(), VIEWS["random-base"]()]), "a view that differs by layer or rescales frequencies stands"),
        (lambda: Mix([Skip(), Standard(), Skip()]), "is given twice: give it once, its share added"),
        (lambda: Mix([Skip(), Standard()], [0.5]), "shares must be a list of 2 numbers, one a view, or None, got"),
        (lambda: Mix([Skip(), Standard()], 0.5), "shares must be a list of 2 numbers, one a view, or None, got 0.5"),
        (lambda: Mix([Skip(), Standard()], [1, 0]), "each of shares must be in \\(0, 1\\), got 1"),
        (lambda: Mix([Skip(), Standard()], [0.5, True]), "each of shares must be in \\(0, 1\\), got True"),
        (lambda: Mix([Skip(), Standard()], [0.5, 0.4]), "shares must be 1 in all, got \\(0.5, 0.4\\), which are 0.9"),
        (lambda: Mix([Standard(), PoSE(target=9)]).check_length(10), "10 tokens reach beyond target=9"),
        (
            lambda: Compose([{"view": "skip", "maxskip": 3}]),
            "Unknown option 'maxskip' of view 'skip'. Did you mean 'max_skip'",
        ),
        (lambda: PerLayer({"view": "yarn"}), "'yarn' is a rescaling; a view is one of"),
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


def test_log_uniform_skips_give_each_doubling_the_same_share():
    view, draws, largest = Skip(split=3, max_skip=63, law="log-uniform"), 60_000, 63
    y = view.draw(torch.full((draws, 1), L), key(draws))["skip"].flatten()
    assert y.min() == 1 and y.max() == largest
    share = torch.bincount(y, minlength=largest + 1)[1:].double() / draws
    k = torch.arange(1, largest + 1, dtype=torch.float64)
    assert (share - (1 + 1 / k).log() / math.log(largest + 1)).abs().max() < 0.006
    doublings = [share[2**i - 1 : 2 ** (i + 1) - 1].sum() for i in range(6)]  # 1, 2..3, 4..7, ..., 32..63
    torch.testing.assert_close(torch.stack(doublings), torch.full((6,), 1 / 6, dtype=torch.float64), rtol=0.05, atol=0)


@pytest.mark.parametrize(
    ("curriculum", "largest"),
    [("linear", {0.0: 4, 0.25: 13, 0.5: 22, 1.0: 40}), ("step", {0.0: 4, 0.49: 4, 0.5: 40, 1.0: 40})],
)
@pytest.mark.parametrize("law", ["uniform", "log-uniform"])
def test_the_range_of_skips_grows_with_training(law, curriculum, largest):
    view = Skip(max_skip=40, law=law, curriculum=curriculum, start=4)
    for progress, limit in largest.items():
        at = replace(key(3000), progress=torch.tensor(progress, dtype=torch.float64))
        y = view.draw(torch.full((3000, 1), L), at)["skip"]
        assert (y.min(), y.max()) == (1, limit)


def test_a_curriculum_may_start_with_true_positions():
    view = Skip(max_skip=40, curriculum="step")
    length = torch.full((50, 1), L)
    early, late = (replace(key(50), progress=torch.tensor(p, dtype=torch.float64)) for p in (0.1, 0.9))
    parameters = view.draw(length, early)
    assert not parameters["skip"].any() and torch.equal(first_changed(view, parameters, length), length)
    parameters = view.draw(length, late)
    assert torch.equal(first_changed(view, parameters, length) % L, parameters["split"])
    for wrong, message in (
        ({"skip": 5, "law": "log-uniform"}, "law and curriculum are of the draw that a fixed skip replaces"),
        ({"law": "normal"}, "law must be one of"),
        ({"curriculum": "step", "until": 1.5}, "until must be in"),
        ({"start": -1}, "start must be at least 0"),
    ):
        with pytest.raises(ValueError, match=message):
            Skip(**wrong)


@pytest.mark.parametrize(("length", "target"), [(60, 60), (60, 480), (61, 500), (200, 800), (9, 400), (3, 9), (2, 9)])
@pytest.mark.parametrize("law", ["uniform", "gaussian"])
def test_the_middle_lies_between_head_and_tail(law, length, target):
    view, draws = Cream(target=target, law=law), 400
    lengths = torch.full((draws, 1), length)
    parameters = view.draw(lengths, key(draws))
    rows, factor = view.rope_index(torch.arange(length), parameters), target // length
    first = first_changed(view, parameters, lengths).flatten().tolist()
    heads = parameters["head"].flatten().tolist()
    assert set(heads) == {length // 3, min(4 * factor, length // 3)}
    for row, h, affected in zip(rows.tolist(), heads, first, strict=True):
        jumps = [t for t in range(1, length) if row[t] - row[t - 1] != 1]
        assert row[:h] == list(range(h)) and row[0] == 0 and set(jumps) <= {h, length - h}
        assert all(a < b for a, b in zip(row, row[1:], strict=False)), "in order"
        assert row[length - h :] == list(range(target - h, target)) or h == 0
        assert affected == (jumps[0] if jumps else length)


def normal_cdf(x):
    return (1 + math.erf(x / math.sqrt(2))) / 2


@pytest.mark.parametrize("sigma", [3.0, 5.0])
def test_the_middle_is_drawn_by_the_law_of_cream(sigma):
    """Frequencies of e among 40000 draws against sums over a, with h = n / 3."""
    n, factor, draws = 30, 4, 40_000  # h is 10 either way, as 4 f is more than n / 3
    view = Cream(target=n * factor, sigma=sigma)
    e = view.draw(torch.full((draws, 1), n), key(draws))["skip"].flatten() + n - 10 - 1
    frequencies = torch.bincount(e, minlength=n * factor).double() / draws
    expected, mu = torch.zeros(n * factor, dtype=torch.float64), 1 + factor
    for a in range(2, 2 * factor + 1):
        below = 0.0 if a == 2 else normal_cdf((a - mu) / sigma)
        above = 1.0 if a == 2 * factor else normal_cdf((a + 1 - mu) / sigma)
        lowest, highest = 10 + (n - 20 - 1) * a // 2, n * a // 2 - 10 - 1
        expected[lowest : highest + 1] += (above - below) / (highest - lowest + 1)
    assert expected.sum() == pytest.approx(1.0)
    assert (frequencies - expected).abs().max() < 0.008


def test_a_uniform_middle_ends_anywhere_before_the_tail():
    n, target, draws = 30, 120, 40_000
    e = Cream(target=target, law="uniform").draw(torch.full((draws, 1), n), key(draws))["skip"].flatten() + n - 10 - 1
    assert (e.min(), e.max()) == (n - 10, target - 10 - 1)
    frequencies = torch.bincount(e)[n - 10 :].double() / draws
    assert (frequencies - 1 / (target - n)).abs().max() < 0.003


def test_what_cream_cannot_do_is_refused():
    for wrong, message in (
        ({"target": 1}, "target must be at least 2"),
        ({"target": 9, "law": "normal"}, "law must be one of"),
        ({"target": 9, "sigma": 0.0}, "sigma must be a finite number above 0"),
    ):
        with pytest.raises(ValueError, match=message):
            Cream(**wrong)
    with pytest.raises(ValueError, match="documents of 10 tokens reach beyond target=9"):
        Cream(target=9).check_length(10)
