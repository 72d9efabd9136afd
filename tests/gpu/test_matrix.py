"""The matrices of tests/rope_patch on a GPU: flex attention with its gradients, FlashAttention where it is installed.

Float32 by eager, SDPA and flex attention; bf16 by FlashAttention, which takes nothing wider.
"""

import functools

import pytest
import torch
from support import cells, objectives, oracle
from support.flash import require
from support.tiny import MIXED, tiny

pytestmark = pytest.mark.gpu
FLASH = ("flash_attention_2", "flash_attention_3", "flash_attention_4")
ATTENTION = ("eager", "sdpa", "flex_attention", *FLASH)
VIEWS = ("skip-drawn", "cyclic", "rpe-sample", "per-layer", "random-base")
SHAPE = {"head_dim": 64, "hidden_size": 256, **MIXED}


@pytest.fixture(autouse=True)
def compiled_anew():
    """Flex attention is compiled for each shape, and past a number of them not at all."""
    torch._dynamo.reset()


def dtype_of(attention):
    return torch.bfloat16 if attention in FLASH else torch.float32


def matrix(kinds_of):
    # a block mask does not know views, and takes seconds to compile: one view stands for all
    return [
        pytest.param(view, attention, kind, id=f"{view}-{attention}-{kind}")
        for attention in ATTENTION
        for view in (VIEWS[:1] if attention == "flex_attention" else VIEWS)
        for kind in kinds_of(attention)
    ]


@pytest.mark.parametrize(("view", "attention", "kind"), matrix(cells.kinds))
@torch.no_grad()
def test_logits_under_a_view(view, attention, kind):
    require(attention)
    model = tiny("qwen3", attention, dtype_of(attention), **SHAPE).cuda()
    cell, case = cells.cell(kind), cells.CASES[view]
    logits, draws = cells.run_under(model, cell.to("cuda"), case)
    expected = cells.expected(oracle.weights_of(model.cpu()), model.config, cell, case, draws)
    cells.compare(cell, logits, expected, 5e-2 if attention in FLASH else 1e-3)


@pytest.mark.parametrize(
    ("view", "attention", "kind"), matrix(lambda attention: cells.kinds(attention, ("plain", "left-padded", "packed")))
)
def test_gradients_under_a_view(view, attention, kind):
    require(attention)
    model = tiny("qwen3", attention, dtype_of(attention), **SHAPE).cuda().train()
    cell, case = cells.cell(kind), cells.CASES[view]
    logits, draws = cells.run_under(model, cell.to("cuda"), case)
    weights = oracle.weights_of(tiny("qwen3", "eager", dtype_of(attention), **SHAPE))
    expected = cells.expected(weights, model.config, cell, case, draws)
    cells.backward(cell, logits, expected)
    cells.compare_gradients(model, cells.gradients(weights), 1e-1 if attention in FLASH else 3e-3)


@functools.cache
def reference(objective, kind, dtype):
    """Documents alone, in float64 on the CPU, with weights that `dtype` has rounded."""
    torch.manual_seed(0)
    return objectives.alone(objective, lambda: tiny("qwen3", "eager", dtype, **SHAPE).double(), cells.cell(kind))


@torch.no_grad()
def test_flash_attention_4_takes_no_packed_rows_without_borders_from_transformers():
    """Why these cells are missing, of a model that is not patched: once this fails, `cells.kinds` can have them."""
    require("flash_attention_4")
    model = tiny("qwen3", "flash_attention_4", torch.bfloat16, **SHAPE).cuda()
    with pytest.raises(ValueError, match="leaves are integers"):
        cells.run(model, cells.cell("packed").to("cuda"))


@pytest.mark.parametrize(
    ("attention", "kind"),
    [(a, k) for a in ATTENTION for k in cells.kinds(a, ("plain", "left-padded", "packed", "padding-free"))],
)
@pytest.mark.parametrize("objective", objectives.OBJECTIVES)
def test_loss_and_gradients_are_those_of_documents_alone(objective, attention, kind):
    require(attention)
    expected = reference(objective, kind, dtype_of(attention))
    model = tiny("qwen3", attention, dtype_of(attention), **SHAPE).cuda()
    torch.manual_seed(0)
    cell = cells.cell(kind).to("cuda")
    loss = objectives.loss_and_gradients(objective, model, cell.inputs, objectives.divisors_of(cell))
    objectives.compare(model, loss, expected, 1.5e-1 if attention in FLASH else 1e-2)
