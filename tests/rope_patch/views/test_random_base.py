"""A base drawn for each step, against the rescaling that replaces it."""

import copy

import pytest
import torch
from support.tiny import tiny, tokens
from support.views import Case, built, factor_laws, key, maybe

from rope_patch import patch_model, rope_view
from rope_patch.rope.rotary import find_decoder, named_rotary_modules
from rope_patch.views import RandomBase, Uniform

CASES = {
    "random-base": Case(
        RandomBase(Uniform(2, 8)), lambda t, n, drawn: t, lambda share, drawn: drawn["base_factor"] ** -share
    ),
}

STRATEGIES = {"random-base": lambda farthest: built(RandomBase, factor=maybe(factor_laws))}


L = 21


@pytest.mark.parametrize(("family", "checkpointing"), [("llama", True), ("qwen3", False)])
def test_it_is_abf_with_the_base_that_was_drawn(family, checkpointing):
    ids = tokens(2, L)
    plain = tiny(family, dtype=torch.float64).train()
    model = patch_model(copy.deepcopy(plain), "random-base")
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    before = [b.clone() for _, m in named_rotary_modules(model) for b in m.buffers()]
    logits = model(ids, use_cache=False).logits
    factor = find_decoder(model)._rope_patch.source.last.parameters["base_factor"].item()
    assert 1 / 8 <= factor <= 8 and factor != 1
    logits.square().sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(before, _buffers(model), strict=True)), "only for that forward"

    theta = plain.config.rope_parameters["rope_theta"] * factor
    expected = patch_model(plain, "abf", theta=theta)(ids, use_cache=False).logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    expected.square().sum().backward()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (p.grad - q.grad).abs().max() < 1e-4 * q.grad.abs().max(), name


def _buffers(model):
    return [b for _, m in named_rotary_modules(model) for b in m.buffers()]


def test_one_base_a_step():
    draws = [RandomBase().draw(torch.full((3, 1), L), key(3, step))["base_factor"] for step in range(9)]
    assert all(1 / 8 <= factor <= 8 and factor.shape == () for factor in draws) and len(set(draws)) == 9


def test_it_goes_with_a_rescaling_and_leaves_evaluation_alone():
    ids = tokens(1, L)
    model = patch_model(tiny(), "yarn", factor=4.0)
    with torch.no_grad():
        expected = model(ids).logits
        patch_model(model, "random-base").train()
        assert not torch.equal(model(ids).logits, expected)
        assert torch.equal(model.eval()(ids).logits, expected)
        with rope_view(model, "standard"):
            assert torch.equal(model(ids).logits, expected)
