"""Family x attention implementation x batch kind: every cell against the float64 oracle. docs/composition.md shows it.

Each cell runs one batch under a fixed skip and compares the logits of all real tokens with an oracle that gets the RoPE
indices and the visibility of that batch written out by hand. test_views_matrix.py goes through the views. Fast tests
hold each pair of family and kind under one attention implementation.
"""

import itertools

import pytest
import torch
from support import cells, oracle
from support.flash import as_flash, emulate
from support.tiny import FAMILIES, tiny

pytestmark = pytest.mark.usefixtures("flex_runs_eagerly")

ATTENTION = ["eager", "sdpa", "flex_attention", "flash_attention_2"]
CELLS = [
    pytest.param(family, attention, batch, id=f"{family}-{attention}-{batch}", marks=[pytest.mark.slow] * (not fast))
    for (i, family), (j, batch), (k, attention) in itertools.product(
        enumerate(FAMILIES), enumerate(cells.KINDS), enumerate(ATTENTION)
    )
    for fast in [(i + j) % len(ATTENTION) == k]
]


@pytest.mark.parametrize(("family", "attention", "batch"), CELLS)
@torch.no_grad()
def test_cell(family, attention, batch, monkeypatch):
    if batch not in cells.kinds(attention):
        pytest.skip("wrong in Transformers itself")
    flash = attention.startswith("flash")
    calls = emulate(monkeypatch)
    model = tiny(family, "sdpa" if flash else attention)
    if flash:
        as_flash(model)
    cell = cells.cell(batch)
    logits, draws = cells.run_under(model, cell, cells.CASES["skip"])
    expected = cells.expected(oracle.weights_of(model), model.config, cell, cells.CASES["skip"], draws)
    cells.compare(cell, logits, expected, 1e-3)
    assert bool(calls) == flash
