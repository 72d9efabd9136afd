"""A middle that lies anywhere between head and tail: draws against the paper's law, what is refused."""

import math

import pytest
import torch
from hypothesis import strategies as st
from support.views import Case, built, first_changed, key, maybe

from rope_patch.views import Cream


def _cream(t, n, drawn):
    middle = torch.where(t < drawn["head"], t, t + drawn["skip"])
    return torch.where(t < n - drawn["head"], middle, t + 200 - n)


CASES = {
    "cream": Case(Cream(target=200), _cream),
}


STRATEGIES = {"cream": lambda farthest: built(Cream, target=farthest, sigma=maybe(st.floats(0.5, 2)))}


@pytest.mark.parametrize(("length", "target"), [(60, 60), (60, 480), (61, 500), (200, 800), (9, 400), (3, 9), (2, 9)])
@pytest.mark.parametrize("sigma", [None, 5.0])
def test_the_middle_lies_between_head_and_tail(sigma, length, target):
    view, draws = Cream(target=target, sigma=sigma), 400
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
    e = Cream(target=target, sigma=None).draw(torch.full((draws, 1), n), key(draws))["skip"].flatten() + n - 10 - 1
    assert (e.min(), e.max()) == (n - 10, target - 10 - 1)
    frequencies = torch.bincount(e)[n - 10 :].double() / draws
    assert (frequencies - 1 / (target - n)).abs().max() < 0.003
