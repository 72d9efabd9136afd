"""Attention of a suffix: two calls that share a softmax, and one with a mask, against the formula in float64."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from rope_patch.attention import prefix as module
from rope_patch.attention.prefix import prefix_attention


def inputs(n_prefix, n, n_kv_heads, dtype=torch.float64, device="cpu", head_dim=16):
    torch.manual_seed(0)
    shapes = [(4, n), (n_kv_heads, n_prefix), (n_kv_heads, n_prefix), (n_kv_heads, n), (n_kv_heads, n)]
    return [torch.randn(2, h, m, head_dim).to(device, dtype).requires_grad_() for h, m in shapes]


def formula(query, prefix_key, prefix_value, key, value, scale):
    k, v = torch.cat([prefix_key, key], 2), torch.cat([prefix_value, value], 2)
    k, v = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (k, v))
    n, n_keys = query.shape[2], k.shape[2]
    hidden = torch.ones(n, n_keys, dtype=torch.bool, device=k.device).triu(n_keys - n + 1)
    return ((query @ k.mT * scale).masked_fill(hidden, -torch.inf).softmax(-1)) @ v


@pytest.mark.parametrize("backend", [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], ids=["merged", "masked"])
@pytest.mark.parametrize("n_kv_heads", [4, 2, 1])
@pytest.mark.parametrize(("n_prefix", "n"), [(0, 9), (1, 9), (30, 1), (70, 130)])
def test_it_is_the_formula_with_all_its_gradients(n_prefix, n, n_kv_heads, backend, monkeypatch):
    arguments = inputs(n_prefix, n, n_kv_heads)
    merged = []
    monkeypatch.setattr(module._Merged, "apply", lambda *a, apply=module._Merged.apply: merged.append(1) or apply(*a))
    with sdpa_kernel(backend):
        actual = prefix_attention(*arguments, 0.3)
    assert bool(merged) == (backend == SDPBackend.FLASH_ATTENTION and n_prefix > 0)
    expected = formula(*arguments, 0.3)
    torch.testing.assert_close(actual, expected)
    direction = torch.randn_like(expected)
    for mine, right in zip(
        torch.autograd.grad(actual, arguments, direction, allow_unused=not n_prefix),
        torch.autograd.grad(expected, arguments, direction),
        strict=True,
    ):
        if right.numel():
            torch.testing.assert_close(mine, right)


@pytest.mark.parametrize("n_kv_heads", [4, 2])
def test_under_autocast_rotated_queries_and_keys_are_cast_as_values_are(n_kv_heads):
    """RoPE gives float32 there, the projection to values bf16."""
    query, prefix_key, prefix_value, key, value = inputs(20, 30, n_kv_heads, torch.float32)
    expected = formula(query, prefix_key, prefix_value, key, value, 0.3)
    with torch.autocast("cpu", torch.bfloat16):
        actual = prefix_attention(query, prefix_key, prefix_value.bfloat16(), key, value.bfloat16(), 0.3)
    assert actual.dtype == torch.bfloat16
    assert (actual - expected).norm() <= 2**-6 * expected.norm()
    assert torch.autograd.grad(actual.sum(), query)[0].dtype == torch.float32


@pytest.mark.parametrize("scale", [1.0, 40.0])
def test_a_prefix_that_weighs_all_or_nothing_is_no_nan(scale):
    """Scores so far apart that one part's share is 0 in float32."""
    arguments = inputs(20, 30, 2, torch.float32)
    actual = prefix_attention(*arguments, scale)
    exact = [x.detach().double().requires_grad_() for x in arguments]
    expected = formula(*exact, scale)
    assert (actual - expected).norm() <= 1e-4 * expected.norm()
    grads = torch.autograd.grad(actual.sum(), arguments)
    for mine, right in zip(grads, torch.autograd.grad(expected.sum(), exact), strict=True):
        assert (mine - right).norm() <= 1e-3 * right.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("n_kv_heads", [4, 2])
@pytest.mark.parametrize(("n_prefix", "n"), [(0, 300), (1, 9), (700, 1), (1000, 777), (64, 4096)])
def test_on_a_gpu_it_is_as_exact_as_torch(n_prefix, n, n_kv_heads):
    arguments = inputs(n_prefix, n, n_kv_heads, torch.bfloat16, "cuda", head_dim=128)
    exact = [x.detach().double().requires_grad_() for x in arguments]
    plain = [x.detach().requires_grad_() for x in arguments]
    actual, expected, their = (
        f(*x, 0.1) for f, x in ((prefix_attention, arguments), (formula, exact), (formula, plain))
    )
    direction = torch.randn_like(actual)
    results = []
    for output, of in ((actual, arguments), (expected, exact), (their, plain)):
        grads = torch.autograd.grad(output, of, direction.to(output.dtype), allow_unused=not n_prefix)
        results.append([output.detach(), *(g for g in grads if g is not None and g.numel())])
    for mine, right, plainly in zip(*results, strict=True):
        assert (mine.double() - right).norm() <= 2 * (plainly.double() - right).norm() + 2**-8 * right.norm()
