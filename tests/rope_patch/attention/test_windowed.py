"""Windows block by block: exact beside a mask of n x n, and no mask of that size."""

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from rope_patch.attention import windowed
from rope_patch.attention.masks import causal_band


@pytest.mark.parametrize("n_before", [0, 2, 9], ids=lambda n: f"{n} keys before")
@pytest.mark.parametrize("window", [1, 3, 6])
@pytest.mark.parametrize("n", [1, 4, 23])
def test_blocks_give_what_a_mask_gives(n, window, n_before, monkeypatch):
    monkeypatch.setattr(windowed, "BLOCK", 4)
    sizes = []
    masked = F.scaled_dot_product_attention
    q, k, v = (
        torch.randn(2, heads, m, 8, dtype=torch.float64) for heads, m in ((4, n), (2, n + n_before), (2, n + n_before))
    )
    inputs = [x.requires_grad_() for x in (q, k, v)]
    wanted = masked(q, k, v, attn_mask=causal_band(n, n + n_before, window, q.device), scale=0.3, enable_gqa=True)
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda *a, **o: (sizes.append(o["attn_mask"].shape), masked(*a, **o))[1]
    )
    found = windowed.WindowedAttention()(q, k, v, window, 0.3)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    grad = torch.randn_like(wanted)
    for one, other in zip(
        torch.autograd.grad(found, inputs, grad), torch.autograd.grad(wanted, inputs, grad), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    assert all(rows <= max(window, 4) and keys <= rows + window - 1 for rows, keys in sizes)
