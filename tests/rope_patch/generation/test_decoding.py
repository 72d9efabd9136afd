"""A step of decoding: what a graph that cannot be made means."""

from contextlib import nullcontext

import pytest
import torch
from support.tiny import tiny

from rope_patch.generation.decoding import Greedy, _Step
from rope_patch.generation.kv_rows import KVRows


@pytest.fixture
def step(monkeypatch):
    """Whose capture, on any machine, runs it."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: nullcontext())
    return _Step(KVRows(tiny(), 1, 8), torch.tensor([3]), torch.tensor([1]), Greedy())


def failing(error):
    def run():
        raise error

    return run


def test_a_forward_that_no_graph_holds_runs_without_one(step, monkeypatch):
    monkeypatch.setattr(step, "_run", failing(RuntimeError("operation not permitted when stream is capturing")))
    assert step._captured(None) is None


def test_memory_that_runs_out_for_a_graph_is_told(step, monkeypatch):
    """Else a thousand rows would be written without a graph, many times as slowly, and nobody would know."""
    monkeypatch.setattr(step, "_run", failing(torch.OutOfMemoryError("full")))
    with pytest.raises(torch.OutOfMemoryError):
        step._captured(None)
