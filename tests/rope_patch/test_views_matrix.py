"""View x attention implementation x batch kind, against the float64 oracle; layers with and without a window.

Fast tests hold each view under every kind of batch and every attention implementation, but not all three at once.
"""

import pytest
import torch
from peft import PrefixTuningConfig, get_peft_model
from support import cells, oracle
from support.flash import as_flash, emulate
from support.marks import needs_own_adapters
from support.tiny import MIXED, tiny, tokens

from rope_patch import rope_view
from rope_patch.views import VIEWS, Cyclic

pytestmark = pytest.mark.usefixtures("flex_runs_eagerly")

ATTENTION = ["eager", "sdpa", "flex_attention", "flash_attention_2"]


def model_for(attention, dtype, monkeypatch):
    emulate(monkeypatch)
    model = tiny("qwen3", "sdpa" if "flash" in attention else attention, dtype, **MIXED)
    return as_flash(model) if "flash" in attention else model


def matrix(attentions, kinds):
    """All cells, those that repeat a pair of view and kind as slow tests."""
    n = len(attentions)
    return [
        pytest.param(view, attention, kind, id=f"{view}-{attention}-{kind}", marks=[pytest.mark.slow] * (not fast))
        for i, view in enumerate(cells.CASES)
        for j, attention in enumerate(attentions)
        for kind in kinds(attention)
        for fast in [(i + cells.KINDS.index(kind)) % n == j]
    ]


def test_every_view_is_here():
    lacking = set(VIEWS) - {case.view.name for case in cells.CASES.values()}
    assert not lacking, "\n".join(lines_to_add(VIEWS[name]) for name in lacking)


def lines_to_add(cls):
    """To the test file of a view, for those who add one."""
    stem = cls.__module__.rpartition(".")[2]
    return (
        f"Add to tests/rope_patch/views/test_{stem}.py a case with the formula written out once more, where t [n] is "
        "float64,\nn_first the tokens of the first forward and drawn what `draw` gave for the document:\n"
        "from support.views import Case\n"
        f'CASES = {{"{cls.name}": Case({cls.__name__}(...), lambda t, n_first, drawn: ...)}}'
    )


@pytest.mark.parametrize(("view", "attention", "batch"), matrix(ATTENTION, cells.kinds))
@torch.no_grad()
def test_logits_under_a_view(view, attention, batch, monkeypatch):
    model = model_for(attention, torch.float32, monkeypatch)
    cell, case = cells.cell(batch), cells.CASES[view]
    logits, draws = cells.run_under(model, cell, case)
    expected = cells.expected(oracle.weights_of(model), model.config, cell, case, draws)
    cells.compare(cell, logits, expected, 1e-3)


@pytest.mark.parametrize(
    ("view", "attention", "batch"),
    matrix(["eager", "sdpa", "flash_attention_2"], lambda _: cells.WHOLE),
)
def test_gradients_under_a_view(view, attention, batch, monkeypatch):
    """Those of flex attention need a GPU: tests/gpu."""
    # eager softmax is float32 in any model, where the float64 mask of a row of padding would be all -inf
    model = model_for(attention, torch.float32 if attention == "eager" else torch.float64, monkeypatch).train()
    cell, case = cells.cell(batch), cells.CASES[view]
    logits, draws = cells.run_under(model, cell, case)
    weights = oracle.weights_of(model)
    expected = cells.expected(weights, model.config, cell, case, draws)
    cells.backward(cell, logits, expected)
    cells.compare_gradients(model, cells.gradients(weights), 1e-3 if attention == "eager" else 1e-4)


@torch.no_grad()
def test_flex_attention_with_a_static_cache_is_wrong_in_transformers_itself():
    """Why these cells are missing: once this fails, `cells.kinds` can have them."""
    model, cell = tiny(attention="flex_attention"), cells.cell("cached-static")
    wrong = cells.run(model, cell) - model(**cell.inputs, use_cache=False).logits
    assert wrong.abs().max() > 1e-2


def test_documents_without_positions_are_refused():
    model, cell = tiny(), cells.cell("padding-free")
    del cell.inputs["position_ids"]
    with rope_view(model, "nope"), pytest.raises(ValueError, match="position_ids that count from 0 in each document"):
        cells.run(model, cell)


@needs_own_adapters
@torch.no_grad()
def test_prefix_tuning_draws_for_each_batch_and_counts_its_prefix():
    wrapped = get_peft_model(tiny(), PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)).eval()
    batches = tokens(2, 9), tokens(3, 7)
    view, result = Cyclic(shift=3), []
    with rope_view(wrapped, view):
        result = [wrapped(ids).logits for ids in batches]
    for ids, logits in zip(batches, result, strict=True):
        n = ids.shape[1]
        index = (torch.arange(4 + n) + 3) % (4 + n)
        with rope_view(wrapped, index=index[None]):
            torch.testing.assert_close(logits, wrapped(ids).logits, rtol=1e-5, atol=1e-6)
    # generate says positions, which start behind the prefix
    with rope_view(wrapped, view):
        generated = wrapped.generate(input_ids=batches[0], max_new_tokens=1, do_sample=False, eos_token_id=None)
    assert torch.equal(generated[:, -1], result[0][:, -1].argmax(-1))
