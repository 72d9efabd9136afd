"""Checkpoints on the host: the layers that were asked for, the same gradients, and room for rows of other lengths."""

import copy

import torch
from support.tiny import tiny, tokens

from rope_patch import offloaded
from rope_patch.offloaded import HostRoom, checkpointed_layers, offloaded_checkpoints, pinned_bytes


def test_the_first_layers_save_on_the_host_and_gradients_are_the_same(monkeypatch):
    saved, plain = [], offloaded.save_on_cpu
    monkeypatch.setattr(offloaded, "save_on_cpu", lambda **options: (saved.append(options), plain(**options))[1])
    model, ids = tiny().train(), tokens(2, 11)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    other = copy.deepcopy(model)
    own = [layer._gradient_checkpointing_func for layer in checkpointed_layers(model)]
    with offloaded_checkpoints(model, 2):
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    other(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert saved == 2 * [{"pin_memory": False, "device_type": "cpu"}]
    assert [layer._gradient_checkpointing_func for layer in checkpointed_layers(model)] == own
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one.grad, two.grad)


def test_other_sizes_are_let_go_where_room_ends(monkeypatch):
    emptied = []
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: emptied.append(1), raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    room = HostRoom(4 * 1024 + 4 * 512)
    sizes = (1000, 1024, 400, 513, 100, 1000)  # of 1024, 1024, 512, 1024, 128 and 1024 bytes pinned
    found = []
    for size in sizes:
        room.make(torch.empty(size, dtype=torch.uint8), 4)
        found.append(len(emptied))
    assert found == [0, 0, 0, 0, 1, 1]
    assert [pinned_bytes(size) for size in (1, 512, 513)] == [1, 512, 1024]
