"""Blocks in another order: formula, draws, what is refused."""

import math

import pytest
import torch
from hypothesis import strategies as st
from support.views import Case, built, drawn, key, maybe

from rope_patch.views import ChunkPermute


def _permuted(t, n, drawn):
    size = -(-n // 3)
    return torch.tensor([drawn[f"block_{int(i) // size}"] * size + i % size if i < n else i for i in t.tolist()])


CASES = {
    "chunk-permute": Case(ChunkPermute(blocks=3), _permuted),
}


STRATEGIES = {"chunk-permute": lambda farthest: built(ChunkPermute, blocks=maybe(st.integers(2, 20)))}


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
