from dataclasses import replace

import pytest
import torch

from rope_patch.base.draws import DrawKey, between, philox4x32


def key(seed=0, step=0, samples=4, stream=0):
    return DrawKey(seed, torch.tensor(step), torch.arange(samples)[:, None], stream)


@pytest.mark.parametrize(
    ("counter", "words", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_philox_gives_the_known_answers_of_its_authors(counter, words, expected):
    assert philox4x32(tuple(torch.tensor(c) for c in counter), words) == expected


def test_a_draw_depends_on_seed_step_sample_stream_and_slot():
    base = key().uniform(0)
    assert torch.equal(base, key().uniform(0))
    others = [key(seed=1), key(seed=1 << 32), key(step=1), key(stream=1), key().substream(0)]
    assert all(not torch.any(base == other.uniform(0)) for other in others)
    assert not torch.any(base == key().uniform(1))
    assert len(base.unique()) == 4


def test_a_sample_draws_the_same_in_any_batch():
    assert torch.equal(key(samples=8).uniform(0)[:4], key(samples=4).uniform(0))


def test_per_step_draws_are_shared_by_all_samples():
    assert key().per_step().uniform(0).shape == ()
    assert key(step=5, samples=2).per_step().uniform(0) == key(step=5, samples=9).per_step().uniform(0)


@pytest.mark.parametrize("step", [0, 5, 2**31 + 7, -1])
def test_a_step_that_is_a_number_draws_the_same_as_one_that_is_a_tensor(step):
    sample = torch.arange(3)[:, None]
    number, tensor = (
        DrawKey(2**40 + 3, step, sample, stream=9),
        DrawKey(2**40 + 3, torch.tensor(step), sample, stream=9),
    )
    for first, second in ((number, tensor), (number.per_step(), tensor.per_step())):
        assert torch.equal(first.uniform(1), second.uniform(1)) and first.uniform(1).dtype == torch.float64
        assert torch.equal(first.integers(-3, 2**30, 4), second.integers(-3, 2**30, 4))
        assert torch.equal(first.integers(0, torch.tensor([[5]]), 4), second.integers(0, torch.tensor([[5]]), 4))
        assert torch.equal(first.turn(7), second.turn(7)) and first.turn(7) == step % 7


@pytest.mark.parametrize(
    "drawn",
    [
        key(seed=-3, step=7),
        key(stream=torch.arange(3)[:, None, None]),
        replace(key(), sample=torch.arange(8).view(2, 4) << 33),
        key(step=2).per_step(),
        DrawKey(5, 1, None),
    ],
    ids=["rows", "layers", "tokens", "a tensor a step", "numbers alone"],
)
def test_words_of_several_slots_are_those_of_each_alone(drawn):
    slots = (range(3), range(64, 72, 4))
    words = drawn.words(*slots)
    assert len(words) == 5
    for slot, word in zip([0, 1, 2, 64, 68], words, strict=True):
        number = between(word, -3, 2**30)
        assert torch.equal(number, drawn.integers(-3, 2**30, slot)) and number.dtype == torch.int64


def test_between_reaches_both_ends_with_tensors_and_numbers():
    words = torch.tensor([0, 2**31, 2**32 - 1])
    assert between(words, 5, torch.tensor([9, 9, 9])).tolist() == [5, 7, 9]
    assert between(2**32 - 1, 5, 9) == 9


def test_uniform_has_the_moments_of_the_uniform_law():
    u = key(samples=200_000).uniform(0)
    assert u.dtype == torch.float64 and 0 <= u.min() and u.max() < 1
    assert abs(u.mean() - 1 / 2) < 5 / (12 * 200_000) ** 0.5
    assert abs(u.var() - 1 / 12) < 1e-3


def test_integers_cover_both_ends_evenly():
    drawn = key(samples=60_000).integers(3, 8, slot=0)
    counts = torch.bincount(drawn.flatten(), minlength=9)
    assert counts[:3].sum() == 0
    assert (counts[3:] - 10_000).abs().max() < 5 * (60_000 * (1 / 6) * (5 / 6)) ** 0.5


def rows_of_documents():
    """t of rows with documents of 5, 1 and 3 tokens, or one of 7 with padding before or behind, and where they lie."""
    packed = torch.tensor([[*range(5), 0, *range(3), -1], [-1, -1, *range(4), *range(4)]])
    whole = torch.tensor([[-1, -1, -1, *range(7)], [*range(7), -1, -1, -1]])
    columns = [[(0, range(5)), (0, [5]), (0, range(6, 9)), (1, range(2, 6)), (1, range(6, 10))]]
    columns += [[(0, range(3, 10)), (1, range(7))]]
    ordinal = torch.tensor([[0] * 5 + [1] + [2] * 4, [3] * 6 + [4] * 4])
    return [(packed, ordinal, columns[0]), (whole, torch.tensor([[0], [1]]), columns[1])]


@pytest.mark.parametrize(("t", "ordinal", "documents"), rows_of_documents(), ids=["packed", "whole"])
def test_sorted_numbers_and_ranks_are_those_of_each_document_alone(t, ordinal, documents):
    drawn = DrawKey(3, 4, ordinal)
    rank, numbers = drawn.rank(t, slot=7), drawn.sorted(t, slot=7)
    assert numbers.dtype == torch.float64 and rank.shape == numbers.shape == t.shape
    for number, (row, columns) in enumerate(documents):
        columns = list(columns)
        own = [DrawKey(3, 4, torch.tensor([[number]])).uniform(7 + i).item() for i in range(len(columns))]
        assert numbers[row, columns].tolist() == sorted(own)
        assert rank[row, columns].tolist() == [sum(other < u for other in own) for u in own]


def test_all_orders_of_a_document_are_equally_likely():
    ranks = key(samples=24000).rank(torch.arange(4)[None])
    orders, counts = ranks.unique(dim=0, return_counts=True)
    assert len(orders) == 24 and (counts - 1000).abs().max() < 150  # 4.8 standard deviations


@pytest.mark.parametrize(("t", "ordinal", "documents"), rows_of_documents(), ids=["packed", "whole"])
def test_each_candidate_of_a_document_is_picked_equally_often(t, ordinal, documents):
    candidates = torch.rand(t.shape, generator=torch.Generator().manual_seed(2)) < 0.6  # some of them on padding
    picks = torch.stack([DrawKey(0, step, ordinal).pick(candidates, t) for step in range(2000)])
    assert picks.shape[1:] == ordinal.shape
    picks = picks.expand(-1, *t.shape)
    for row, columns in documents:
        columns = list(columns)
        of_document = picks[:, row, columns]
        assert (of_document == of_document[:, :1]).all(), "one for all tokens of a document"
        among = [i for i, column in enumerate(columns) if candidates[row, column]]
        counts = [int((of_document[:, 0] == i).sum()) for i in (among or [-1])]
        share = 2000 / len(counts)
        assert sum(counts) == 2000 and all(abs(count - share) < 5 * share**0.5 for count in counts)
