"""Objective x attention implementation x batch kind: loss and gradients are those of each document alone, by eager.

That documents alone are right is shown against formulas in the files of distillation.
"""

import functools
import itertools

import pytest
import torch
from support import cells, objectives
from support.flash import as_flash, emulate
from support.tiny import MIXED, tiny

from trl_ext.objectives import OBJECTIVES

pytestmark = pytest.mark.usefixtures("flex_runs_eagerly")


def test_every_objective_is_here():
    lacking = [name for name in OBJECTIVES if not any(case.split()[0] == name for case in objectives.OBJECTIVES)]
    assert not lacking, "\n".join(
        f'add "{name}" to OBJECTIVES of tests/support/objectives.py, and a function that `loss_and_gradients` calls: '
        "the loss of one batch, with every token a label, divided by `divisors`"
        for name in lacking
    )


def eager():
    return tiny("qwen3", "eager", torch.float64, **MIXED)


@functools.cache
def reference(objective, kind):
    torch.manual_seed(0)
    return objectives.alone(objective, eager, cells.cell(kind))


def grid(*attentions):
    """Every cell; the fast ones have each pair of objective, kind of batch and one of three attentions."""
    for (i, objective), (k, kind) in itertools.product(enumerate(objectives.OBJECTIVES), enumerate(cells.WHOLE)):
        for a, attention in enumerate(attentions):
            fast = (i + k + a) % 3 == 0
            yield pytest.param(objective, kind, attention, marks=[] if fast else pytest.mark.slow)


@pytest.mark.parametrize(("objective", "kind", "attention"), grid("eager", "sdpa", "flash_attention_2"))
def test_loss_and_gradients_are_those_of_documents_alone(objective, kind, attention, monkeypatch):
    expected = reference(objective, kind)
    emulate(monkeypatch)
    # eager softmax is float32 in any model, where the float64 mask of a row of padding would be all -inf
    dtype = torch.float32 if attention == "eager" else torch.float64
    model = tiny("qwen3", "eager" if attention == "eager" else "sdpa", dtype, **MIXED)
    if "flash" in attention:
        as_flash(model)
    torch.manual_seed(0)
    cell = cells.cell(kind)
    loss = objectives.loss_and_gradients(objective, model, cell.inputs, objectives.divisors_of(cell))
    objectives.compare(model, loss, expected, 1e-3 if attention == "eager" else 1e-4)


@pytest.mark.parametrize(("objective", "kind", "attention"), grid("flex_attention"))
@torch.no_grad()
def test_flex_attention_gives_the_loss_of_documents_alone(objective, kind, attention):
    """Its gradients need a GPU: tests/gpu."""
    with torch.enable_grad():
        expected, _ = reference(objective, kind)
    torch.manual_seed(0)
    cell = cells.cell(kind)
    model = tiny("qwen3", attention, **MIXED)
    loss = objectives.loss_and_gradients(objective, model, cell.inputs, objectives.divisors_of(cell))
    torch.testing.assert_close(loss.double(), expected.double(), rtol=1e-3, atol=0)
