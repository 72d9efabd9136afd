"""Reference twin of `decode_attention`, which also runs where Triton does not."""

import torch
from torch.nn import functional as F  # noqa: N812


def decode_attention_ref(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    begin: torch.Tensor,
    end: torch.Tensor,
    sm_scale: float | None = None,
) -> torch.Tensor:
    """Reference twin of `decode_attention`: any device, computed in the dtype of its arguments."""
    batch, n_kv_heads, capacity, _ = k.shape
    token = torch.arange(capacity, device=k.device)
    visible = (token >= begin[:, None]) & (token < end[:, None])  # [batch, capacity]
    # [batch, n_kv_heads, group, head_dim]: query heads of one key head stand where SDPA has queries
    grouped = q.view(batch, n_kv_heads, -1, q.shape[-1])
    out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=visible[:, None, None], scale=sm_scale)
    return out.reshape(batch, q.shape[1], v.shape[-1])
