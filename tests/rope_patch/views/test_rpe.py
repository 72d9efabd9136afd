"""Sorted samples of a larger range: draws, what is refused."""

import math

import torch
from hypothesis import strategies as st
from support.views import Case, L, built, key, maybe

from rope_patch.base.draws import DrawKey
from rope_patch.views import RPE


def _sampled(t, n, drawn):
    table, last = drawn["_table"][:n].double(), n - 1
    assert len(table.unique()) == len(table) and table.max() < 64 and (table.diff() > 0).all()
    return torch.stack([table[i] if i <= last else table[last] + i - last for i in t.long()])


CASES = {
    "rpe": Case(RPE(max_index=64), _sampled),
    "rpe-sample": Case(RPE(max_index=64, granularity="sample"), _sampled),
    "rpe-floats": Case(RPE(max_index=64, values="floats"), _sampled),
}


STRATEGIES = {
    "rpe": lambda farthest: built(
        RPE,
        max_index=farthest,
        granularity=maybe(st.sampled_from(["step", "sample"])),
        values=maybe(st.sampled_from(["integers", "floats"])),
    )
}


def test_rpe_is_a_sorted_sample_without_repeats():
    view, steps = RPE(max_index=20), torch.arange(1500)[:, None]
    rows = view.rope_index(torch.arange(L), view.draw(torch.full((1500, 1), L), DrawKey(0, steps, steps)))
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


def test_floats_are_sorted_and_distributed_as_order_statistics():
    """The k-th smallest of L numbers from U[0, 1) has Beta(k, L + 1 - k), so also at L = max_index."""
    view, steps = RPE(max_index=L, values="floats"), torch.arange(4000)[:, None]
    rows = view.rope_index(torch.arange(L), view.draw(torch.full((4000, 1), L), DrawKey(0, steps, steps))) / L
    assert rows.dtype == torch.float64 and (rows.diff(dim=1) > 0).all() and 0 <= rows.min() and rows.max() < 1
    k = torch.arange(1, L + 1, dtype=torch.float64)
    mean, variance = k / (L + 1), k * (L + 1 - k) / ((L + 1) ** 2 * (L + 2))
    assert ((rows.mean(0) - mean).abs() < 4.5 * (variance / 4000).sqrt()).all()
    assert (rows.var(0) / variance - 1).abs().max() < 0.15
    gaps = rows.diff(dim=1)  # of equal law, and as likely beyond x as (1 - x)^L
    assert ((gaps > 0.1).double().mean() - 0.9**L).abs() < 0.01


def test_floats_of_a_document_are_its_own_and_shared_by_those_of_equal_length():
    t, view = torch.arange(L), RPE(max_index=50, values="floats")
    lengths = torch.tensor([[L], [5], [L]])
    rows = view.rope_index(t, view.draw(lengths, key(3)))
    assert torch.equal(rows[0], rows[2])
    first = torch.stack([key().per_step().uniform(slot) for slot in range(L)]) * 50
    assert torch.equal(rows[0], first.sort().values) and torch.equal(rows[1, :5], first[:5].sort().values)
    assert torch.equal(rows[1, 5:], rows[1, 4] + torch.arange(1, L - 4)), "tokens that are decoded later follow on"
