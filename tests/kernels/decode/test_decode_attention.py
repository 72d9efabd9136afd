"""Attention of one token a row over partly filled buffers: as exact as torch, and blind to what lies outside."""

import pytest
import torch
from support.operators import implementation

from rope_kernels import decode_attention, decode_attention_ref
from rope_kernels.decode.triton_parts import decode_attention_in_parts

HAS_CUDA = torch.cuda.is_available()
DEVICE = "cuda" if HAS_CUDA else "cpu"
PART = 64  # tokens of a program
# batch, n_heads, n_kv_heads, capacity, head_dim, value_dim, begin, end
CASES = {
    "one token": (1, 2, 2, 5, 16, 16, [0], [1]),
    "groups of three": (2, 6, 2, 80, 64, 64, [0, 0], [70, 40]),
    "a window over two parts": (2, 4, 1, 150, 20, 24, [50, 3], [80, 150]),
    "empty parts before and behind": (1, 4, 2, 200, 8, 8, [PART], [2 * PART]),
}


@pytest.fixture(autouse=True)
def short_parts(monkeypatch):
    monkeypatch.setattr("rope_kernels.decode.triton_parts._PART", PART)
    implementation("gpu" if HAS_CUDA else "interpreter", monkeypatch)


def inputs(name, dtype=torch.float32):
    batch, n_heads, n_kv_heads, capacity, head_dim, value_dim, begin, end = CASES[name]
    q = torch.randn(batch, n_heads, head_dim)
    k = torch.randn(batch, n_kv_heads, capacity, head_dim)
    v = torch.randn(batch, n_kv_heads, capacity, value_dim)
    begin, end = (torch.tensor(x) for x in (begin, end))
    return tuple(x.to(DEVICE, dtype if x.is_floating_point() else None) for x in (q, k, v, begin, end))


def spoiled(k, v, begin, end):
    """The same with NaN wherever no row looks."""
    token = torch.arange(k.shape[2], device=k.device)
    hidden = (token < begin[:, None]) | (token >= end[:, None])
    return (x.masked_fill(hidden[:, None, :, None], float("nan")) for x in (k, v))


@pytest.mark.parametrize("case", CASES)
def test_the_kernel_equals_its_twin_in_double(case):
    q, k, v, begin, end = inputs(case)
    exact = decode_attention_ref(q.double(), k.double(), v.double(), begin, end, 0.3)
    actual = decode_attention_in_parts(q, *spoiled(k, v, begin, end), begin, end, 0.3)
    torch.testing.assert_close(actual.double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_half_precision_is_as_exact_as_torch(case, dtype):
    q, k, v, begin, end = inputs(case, dtype)
    exact = decode_attention_ref(q.double(), k.double(), v.double(), begin, end)
    torch_error = (decode_attention_ref(q, k, v, begin, end) - exact).abs().max()
    actual = decode_attention(q, *spoiled(k, v, begin, end), begin, end)
    assert (actual - exact).abs().max() <= 2 * torch_error + 1e-2 * exact.abs().max()


def test_the_twin_is_softmax_over_what_is_seen():
    q, k, v, begin, end = inputs("a window over two parts")
    actual = decode_attention(q, k, v, begin, end)
    scores = torch.einsum("hd,nd->hn", q[0], k[0, 0, 50:80]) * q.shape[-1] ** -0.5
    torch.testing.assert_close(actual[0], scores.softmax(-1) @ v[0, 0, 50:80], rtol=1e-4, atol=1e-5)


def test_tensors_that_do_not_belong_together_are_refused():
    q, k, v, begin, end = inputs("groups of three")
    with pytest.raises(ValueError, match=r"q must be \[batch, n_heads, head_dim\]"):
        decode_attention(q[:, None], k, v, begin, end)
    with pytest.raises(ValueError, match="multiple of the heads of k"):
        decode_attention(q[:, :5], k, v, begin, end)
