"""Chunks moved apart over a target window: draws, cutting, what is refused."""

import pytest
import torch
from hypothesis import strategies as st
from support.views import Case, built, first_changed, key, maybe

from rope_patch.base import draws
from rope_patch.views import PoSE


def _pose(t, n, drawn):
    return t + torch.where(
        t < drawn["_border_1"], 0, torch.where(t < drawn["_border_2"], drawn["skip_1"], drawn["skip_2"])
    )


CASES = {
    "pose": Case(PoSE(target=200, chunks=3), _pose),
}


STRATEGIES = {"pose": lambda farthest: built(PoSE, target=farthest, chunks=maybe(st.integers(2, 5)))}


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


@pytest.mark.parametrize("chunks", [2, 3, 5])
def test_all_draws_of_pose_are_one_computation_of_the_numbers_of_their_slots(monkeypatch, chunks):
    drawn, n = key(50), chunks - 1
    length = torch.arange(50)[:, None] % 17 + 1
    last = (length + 1) // 2 if chunks == 2 else length - 1
    borders = torch.stack([drawn.integers(1, last.clamp(min=1), slot) for slot in range(n)]).sort(0).values
    offset, expected = torch.zeros_like(length), {}
    for i, border in enumerate(borders, 1):
        offset = drawn.integers(offset, 60 - length, 64 + i)
        expected |= {f"_border_{i}": border, f"skip_{i}": offset}
    calls = []
    philox = draws.philox4x32
    monkeypatch.setattr(draws, "philox4x32", lambda *counter: calls.append(1) or philox(*counter))
    parameters = PoSE(target=60, chunks=chunks).draw(length, drawn)
    assert len(calls) == 1
    assert parameters.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in parameters.items())


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
