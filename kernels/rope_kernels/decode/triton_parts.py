"""Triton side of `decode_attention`: each program reads one part of a row's keys, then parts are weighted."""

import torch
import triton
import triton.language as tl

_PART = 1024  # tokens of a program: enough programs to fill a GPU from one row of 128K tokens on


@triton.jit
def _decode_part_kernel(
    q_ptr, k_ptr, v_ptr, begin_ptr, end_ptr, out_ptr, lse_ptr,
    stride_qb, stride_qh, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    n_kv_heads, group, head_dim, value_dim, n_parts, scale_log2,
    PART: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // n_kv_heads).to(tl.int64)  # row * stride passes 2**31 in a long cache
    kv_head = (tl.program_id(0) % n_kv_heads).to(tl.int64)
    part = tl.program_id(1)
    first = tl.maximum(tl.load(begin_ptr + row).to(tl.int32), part * PART)
    last = tl.minimum(tl.load(end_ptr + row).to(tl.int32), part * PART + PART)
    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    e = tl.arange(0, BLOCK_V)
    head = kv_head * group + g  # [BLOCK_G] query heads that share the key head
    q_offset = row * stride_qb + head[:, None] * stride_qh + d[None, :]
    q = tl.load(q_ptr + q_offset, mask=(g[:, None] < group) & (d[None, :] < head_dim), other=0.0)  # [BLOCK_G, BLOCK_D]
    k_ptr += row * stride_kb + kv_head * stride_kh
    v_ptr += row * stride_vb + kv_head * stride_vh
    top = tl.full([BLOCK_G], -float("inf"), tl.float32)  # largest score so far, in bits
    total = tl.zeros([BLOCK_G], tl.float32)  # sum_j exp2(score_j - top)
    weighted = tl.zeros([BLOCK_G, BLOCK_V], tl.float32)  # sum_j exp2(score_j - top) v_j
    for start in range((first // BLOCK_N) * BLOCK_N, last, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        seen = (n >= first) & (n < last)
        k_mask = seen[None, :] & (d[:, None] < head_dim)
        # [BLOCK_D, BLOCK_N], transposed as it is loaded
        k = tl.load(k_ptr + n[None, :].to(tl.int64) * stride_kn + d[:, None], mask=k_mask, other=0.0)
        scores = tl.dot(q, k, input_precision="ieee") * scale_log2  # [BLOCK_G, BLOCK_N]
        scores = tl.where(seen[None, :], scores, -float("inf"))
        # every block up to `last` holds a token that is seen, so no pivot is -inf
        new_top = tl.maximum(top, tl.max(scores, 1))
        weight = tl.exp2(scores - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weight, 1)
        v_mask = seen[:, None] & (e[None, :] < value_dim)
        v = tl.load(v_ptr + n[:, None].to(tl.int64) * stride_vn + e[None, :], mask=v_mask, other=0.0)
        weighted = weighted * shrink[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
        top = new_top
    # a part that sees nothing weighs nothing
    out = weighted / tl.where(total > 0, total, 1.0)[:, None]
    lse = tl.where(total > 0, top + tl.log2(tl.where(total > 0, total, 1.0)), -float("inf"))
    place = (row * n_kv_heads * group + head) * n_parts + part  # in [batch, n_heads, n_parts]
    tl.store(lse_ptr + place, lse, mask=g < group)
    out_mask = (g[:, None] < group) & (e[None, :] < value_dim)
    tl.store(out_ptr + place[:, None] * value_dim + e[None, :], out, mask=out_mask)


def decode_attention_in_parts(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, begin: torch.Tensor, end: torch.Tensor, sm_scale: float
) -> torch.Tensor:
    """`decode_attention` on a GPU, or in Triton's interpreter."""
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    batch, n_heads, head_dim = q.shape
    n_kv_heads, capacity, value_dim = k.shape[1], k.shape[2], v.shape[3]
    n_parts = triton.cdiv(capacity, _PART)
    out = torch.empty(batch, n_heads, n_parts, value_dim, device=q.device, dtype=torch.float32)
    lse = torch.empty(batch, n_heads, n_parts, device=q.device, dtype=torch.float32)
    wide = max(head_dim, value_dim) > 128 or q.dtype == torch.float32  # tiles of keys and values share an SM's memory
    with torch.cuda.device_of(q):  # Triton launches on the current GPU, and a model may be spread over several
        _decode_part_kernel[(batch * n_kv_heads, n_parts)](
            q, k, v, begin, end, out, lse,
            q.stride(0), q.stride(1), *k.stride()[:3], *v.stride()[:3],
            # log2(e), because the kernel takes powers of 2
            n_kv_heads, n_heads // n_kv_heads, head_dim, value_dim, n_parts, sm_scale * 1.4426950408889634,
            PART=_PART,
            BLOCK_G=max(16, triton.next_power_of_2(n_heads // n_kv_heads)),  # tl.dot multiplies 16 rows or more
            BLOCK_N=32 if wide else 64,
            BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
            BLOCK_V=max(16, triton.next_power_of_2(value_dim)),
            # without tensor cores fewer threads would spill registers, at head_dim 256 more than 5 KB each
            num_warps=8 if q.dtype == torch.float32 else 4,
            num_stages=2 if wide else 3,
        )  # fmt: skip
    # [batch, n_heads, n_parts], each part's share of the softmax over all
    share = torch.exp2(lse - lse.amax(-1, keepdim=True))
    share = share / share.sum(-1, keepdim=True)
    return (share[..., None] * out).sum(2).to(v.dtype)
