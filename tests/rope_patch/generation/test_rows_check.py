"""Models are read by rows if these give their logits but for rounding, however much a model rounds."""

import pytest
import torch
from support.tiny import MIXED, gemma3, tiny

from rope_patch.generation import rows_check
from rope_patch.generation.kv_rows import KVRows
from rope_patch.generation.rows_check import bytes_if_alike

MODELS = {"llama": tiny, "gemma3": gemma3, "qwen3 mixed": lambda: tiny("qwen3", **MIXED)}


def rough(make_model, dtype, times=12):
    """A model whose layers do much, so that logits move far by rounding."""
    torch.manual_seed(0)
    model = make_model()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2 and "embed" not in name:
                weight.mul_(times)
    return model.to(dtype)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", MODELS)
def test_a_model_is_read_by_rows_whatever_it_rounds(family, dtype):
    model = rough(MODELS[family], dtype)
    assert bytes_if_alike(model) > 0


def off_by(size, monkeypatch):
    """Let what rows give be off by so much of the spread of logits, and the model's own cache by nothing.

    As kernels of a GPU may have it, which round alike in a plain forward and in the model's own cache.
    """
    by_rows = rows_check._by_rows

    def rounded_otherwise(rows, ids):
        logits = by_rows(rows, ids)
        return logits + size * logits.std(-1, keepdim=True) * torch.randn_like(logits)

    monkeypatch.setattr(rows_check, "_by_rows", rounded_otherwise)
    monkeypatch.setattr(rows_check, "_by_own_cache", rows_check._plain)


@torch.no_grad()
@pytest.mark.parametrize(("size", "is_alike"), [(0.1, True), (0.7, False)])
def test_rows_may_be_off_as_far_as_a_rounding_of_embeddings_moves_logits(size, is_alike, monkeypatch):
    model = rough(lambda: tiny(num_hidden_layers=12), torch.bfloat16, times=6)
    off_by(size, monkeypatch)
    assert (bytes_if_alike(model) > 0) == is_alike


@torch.no_grad()
def test_rows_are_not_taken_where_two_tokens_that_change_places_move_logits_no_further(monkeypatch):
    model = rough(lambda: tiny(num_hidden_layers=12), torch.bfloat16, times=6)
    off_by(0.1, monkeypatch)
    plain = rows_check._plain
    # of a model that does not look at its tokens, nothing can be told
    monkeypatch.setattr(rows_check, "_plain", lambda m, ids: plain(m, ids.sort().values))
    assert bytes_if_alike(model) == -1


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
