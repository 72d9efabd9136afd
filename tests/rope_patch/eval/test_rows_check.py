"""Models are read by rows if these give their logits but for rounding, however much a model rounds."""

import pytest
import torch
from support.tiny import MIXED, gemma3, tiny

from rope_patch.eval.kv_rows import KVRows
from rope_patch.eval.rows_check import bytes_if_alike

MODELS = {"llama": tiny, "gemma3": gemma3, "qwen3 mixed": lambda: tiny("qwen3", **MIXED)}


def rough(make_model, dtype):
    """A model whose layers do much, so that logits move far by rounding."""
    torch.manual_seed(0)
    model = make_model()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2 and "embed" not in name:
                weight.mul_(12)
    return model.to(dtype)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", MODELS)
def test_a_model_is_read_by_rows_whatever_it_rounds(family, dtype):
    model = rough(MODELS[family], dtype)
    assert bytes_if_alike(model) > 0


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wrong", ["a token copied less", "a place further"])
def test_one_misplaced_token_is_found(wrong, dtype, monkeypatch):
    model = rough(tiny, dtype)
    copy, decode = KVRows.copy_prefix, KVRows.decode
    if wrong == "a place further":
        make = KVRows.__init__
        monkeypatch.setattr(KVRows, "__init__", lambda rows, m, n, k: make(rows, m, n, k + 1))
        monkeypatch.setattr(KVRows, "decode", lambda rows, token, slots: decode(rows, token, slots + 1))
    else:
        monkeypatch.setattr(KVRows, "copy_prefix", lambda rows, *a: copy(rows, *a[:-1], a[-1] - 1))
    assert bytes_if_alike(model) == -1
