"""Checkpoints on the host: those that were asked for, in pieces that rows of all lengths share, the same gradients."""

import copy

import pytest
import torch
from support.tiny import tiny, tokens

from trl_ext.memory import offloaded
from trl_ext.memory.offloaded import OnHost, checkpointed_layers, offloaded_checkpoints, pinned_bytes


def test_the_first_layers_save_on_the_host_and_gradients_are_the_same(monkeypatch):
    saved, to_host = [], offloaded._to_host
    monkeypatch.setattr(offloaded, "_to_host", lambda tensor: (saved.append(tensor.shape), to_host(tensor))[1])
    model, ids = tiny().train(), tokens(2, 11)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    other = copy.deepcopy(model)
    own = [layer._gradient_checkpointing_func for layer in checkpointed_layers(model)]
    with offloaded_checkpoints(model, 2):
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    other(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert saved == 2 * [(2, 11, model.config.hidden_size)]
    assert [layer._gradient_checkpointing_func for layer in checkpointed_layers(model)] == own
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one.grad, two.grad)


@pytest.mark.parametrize("shape", [(3, 5, 8), (4, 8), (1,), (), (0, 4), (33,)])
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_what_comes_back_is_what_went(monkeypatch, shape, strided, dtype):
    monkeypatch.setattr(offloaded, "PIECE", 128)
    tensor = (torch.arange(torch.Size(shape).numel()) % 7 - 3).to(dtype).reshape(shape)
    if strided:
        tensor = tensor.mT if tensor.ndim > 1 else tensor.flip(0) if tensor.ndim else tensor
    device, size, pieces = offloaded._to_host(tensor)
    held = sum(piece.untyped_storage().nbytes() for piece in pieces)
    needed = tensor.numel() * tensor.element_size()
    assert held == (128 * -(-needed // 128) if needed > 128 else needed)
    back = offloaded._from_host((device, size, pieces))
    assert back.dtype == dtype and torch.equal(back, tensor)


def test_a_tensor_that_is_saved_twice_and_written_later_keeps_what_it_was():
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    with OnHost():
        y = x.exp()
        loss = (y * y).sum()
    expected = 2 * (2 * x.detach()).exp()
    with torch.no_grad():
        x.zero_()
    loss.backward()
    assert torch.allclose(x.grad, expected, rtol=1e-14)


def test_bytes_that_are_pinned(monkeypatch):
    assert [pinned_bytes(size) for size in (1, 512, 513, 1 << 26)] == [1, 512, 1024, 1 << 26]
    assert [pinned_bytes((1 << 26) + 1), pinned_bytes(5 << 26)] == [2 << 26, 5 << 26]
