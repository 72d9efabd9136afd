"""Attention of one new token a row over keys and values in buffers that are longer than what they hold."""

import torch

from ..common.checks import described
from .reference import decode_attention_ref


def decode_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    begin: torch.Tensor,
    end: torch.Tensor,
    sm_scale: float | None = None,
) -> torch.Tensor:
    """out[b, h] = sum_j softmax_j(sm_scale q[b, h] . k[b, g, j]) v[b, g, j] over begin[b] <= j < end[b].

    g is the key head of query head h. On a GPU a kernel reads each visible key and value once, in parts that run in
    parallel. Its launches do not depend on the values of `begin` and `end`, so a CUDA graph may hold them.

    Args:
        q: [batch, n_heads, head_dim].
        k: [batch, n_kv_heads, capacity, head_dim]; n_heads is a multiple of n_kv_heads.
        v: [batch, n_kv_heads, capacity, value_dim].
        begin: [batch] integers, first token that the row sees.
        end: [batch] integers, the token after the last one, more than `begin` and at most capacity.
        sm_scale: None means head_dim ** -0.5.

    Returns:
        [batch, n_heads, value_dim] in the dtype of v.

    Raises:
        ValueError: shapes do not fit together.
    """
    if q.ndim != 3 or k.ndim != 4 or v.shape[:3] != k.shape[:3] or q.shape[0] != k.shape[0]:
        raise ValueError(
            "q must be [batch, n_heads, head_dim], k and v [batch, n_kv_heads, capacity, dim], got "
            f"{described(q)}, {described(k)} and {described(v)}."
        )
    if q.shape[1] % k.shape[1] or q.shape[2] != k.shape[3]:
        raise ValueError(
            f"q must have a multiple of the heads of k, and its head_dim, got {described(q)} and {described(k)}."
        )
    scale = q.shape[-1] ** -0.5 if sm_scale is None else sm_scale
    if q.is_cuda and q.dtype in (torch.float16, torch.bfloat16, torch.float32):
        from .triton_parts import decode_attention_in_parts

        return decode_attention_in_parts(q, k, v, begin, end, scale)
    return decode_attention_ref(q, k, v, begin, end, scale)
