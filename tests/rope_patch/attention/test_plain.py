"""Attention of the last tokens of a row without masks of n x n, against the formula in float64."""

from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend

from rope_patch.attention.plain import Windows
from rope_patch.families.attention_calls import AttentionCall


def call(n, n_keys, n_kv_heads, dtype=torch.float64, device="cpu", head_dim=16):
    torch.manual_seed(0)
    shapes = [(4, n), (n_kv_heads, n_keys), (n_kv_heads, n_keys)]
    q, k, v = (torch.randn(2, heads, m, head_dim).to(device, dtype) for heads, m in shapes)
    return AttentionCall(
        torch.nn.Module(), q, k, v, None, {"scaling": 0.3}, torch.nn.functional.scaled_dot_product_attention
    )


def formula(call, window):
    q, k, v = (x.double() for x in (call.query, call.key, call.value))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    n, n_keys = q.shape[2], k.shape[2]
    distance = torch.arange(n_keys - n, n_keys)[:, None] - torch.arange(n_keys)
    hidden = ((distance < 0) | (distance >= (window or n_keys))).to(q.device)
    return ((q @ k.mT * 0.3).masked_fill(hidden, -torch.inf).softmax(-1) @ v).transpose(1, 2)


@pytest.mark.parametrize("window", [None, 1, 7, 64])
@pytest.mark.parametrize("n_kv_heads", [4, 2, 1])
@pytest.mark.parametrize(("n", "n_keys"), [(9, 9), (1, 40), (33, 40), (40, 100)])
def test_it_is_the_formula(n, n_keys, n_kv_heads, window, monkeypatch):
    monkeypatch.setattr("rope_patch.attention.windowed.BLOCK", 8)
    given = call(n, n_keys, n_kv_heads)
    torch.testing.assert_close(Windows().attend(given, window), formula(given, window))


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize(("n", "n_keys"), [(9, 9), (33, 40)])
def test_under_autocast_it_multiplies_as_plain_attention_does(n, n_keys, window):
    """Of weights in float32 rotated queries and keys are float32, and values are not."""
    given = call(n, n_keys, 2, torch.float32)
    given = replace(given, value=given.value.to(torch.bfloat16))
    rounded = replace(given, query=given.query.to(torch.bfloat16), key=given.key.to(torch.bfloat16))
    with torch.autocast("cpu", torch.bfloat16):
        found = Windows().attend(given, window)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, Windows().attend(rounded, window), rtol=0, atol=0)
    torch.testing.assert_close(found.double(), formula(given, window), rtol=0.05, atol=0.05)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("n_kv_heads", [4, 2])
@pytest.mark.parametrize(("n", "n_keys"), [(1, 700), (9, 10), (777, 1777), (4096, 5120)])
def test_on_a_gpu_in_bf16_it_is_as_exact_as_torch(n, n_keys, n_kv_heads, window):
    given = call(n, n_keys, n_kv_heads, torch.bfloat16, "cuda", head_dim=64)
    exact = formula(given, window)
    k, v = (x.repeat_interleave(4 // n_kv_heads, 1) for x in (given.key, given.value))
    visible = torch.ones(n, n_keys, dtype=torch.bool, device="cuda").tril(n_keys - n)
    if window is not None:
        visible &= ~torch.ones_like(visible).tril(n_keys - n - window)
    theirs = torch.nn.functional.scaled_dot_product_attention(given.query, k, v, attn_mask=visible, scale=0.3)
    mine = Windows().attend(given, window)
    assert (mine - exact).norm() <= 2 * (theirs.transpose(1, 2) - exact).norm() + 2**-8 * exact.norm()


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "n_keys"), [(1024, 3072), (1024, 3000), (300, 1024)])
def test_a_hopper_gpu_reads_what_follows_in_parts_if_few_plans_do(n, n_keys, monkeypatch):
    """cuDNN makes a plan for each new shape, which takes longer than attention of a short prompt."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("cuDNN's kernel is PyTorch's choice on Hopper")
    given, parts = call(n, n_keys, 2, torch.bfloat16, "cuda", head_dim=64), []
    choice = torch._fused_sdp_choice(given.query, given.key, given.value, None, 0.0, True, enable_gqa=True)
    monkeypatch.setattr("rope_patch.attention.plain.prefix_attention", lambda q, *_: parts.append(1) or q)
    Windows().attend(given, None)
    assert bool(parts) == (choice == SDPBackend.CUDNN_ATTENTION.value and n_keys % 1024 == n % 1024 == 0)
