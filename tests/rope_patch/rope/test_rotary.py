"""Where RoPE lives in a model: frequencies that stay as they are while a block runs."""

import pytest
import torch
from support.tiny import tiny

from rope_patch import patch_model
from rope_patch.rope.rotary import frequencies_kept, named_rotary_modules

DIVISORS = [1.0, 2.0, 3.0, 4.0]


def tables(rotary, indices):
    """Cosines and sines at `indices`."""
    return torch.stack(rotary(torch.zeros(1), torch.tensor([indices])))


@pytest.mark.parametrize(("short", "kept"), [(DIVISORS, True), ([1.0] * 4, False)], ids=["one set", "two sets"])
def test_longrope_of_one_set_is_asked_for_no_length(short, kept):
    model = patch_model(tiny(), "longrope", factor=4.0, long_factor=DIVISORS, short_factor=short)
    ((_, rotary),) = named_rotary_modules(model)
    rows = ([0, 5], [0, 255], [0, 7])
    wanted = [tables(rotary, row) for row in rows]
    with frequencies_kept(model):
        assert (rotary.rope_type != "longrope") == kept
        found = [tables(rotary, row) for row in rows]
    assert rotary.rope_type == "longrope"
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_they_are_kept_until_a_block_fails_too():
    model = patch_model(tiny(), "longrope", factor=4.0, long_factor=DIVISORS, short_factor=DIVISORS)
    ((_, rotary),) = named_rotary_modules(model)
    with pytest.raises(RuntimeError), frequencies_kept(model), frequencies_kept(model):
        raise RuntimeError
    assert rotary.rope_type == "longrope"


def test_other_models_are_as_they_are():
    model = tiny()
    ((_, rotary),) = named_rotary_modules(model)
    with frequencies_kept(model):
        assert rotary.rope_type == "default"
