"""Triton kernel of `vocabulary_rows`: a sweep over a row of products, two for "jsd", and one that writes gradients."""

import torch
import triton
import triton.language as tl

from .rows import Direction, HeadOutput, RowMetrics, ce_factors

# words that are read at once, in parts that follow one another; a thread has the same places in each part. The quickest
# of 34 choices on an H200: 3.6 TB/s read and written
_BLOCK, _PARTS, _WARPS, _STAGES = 4096, 2, 8, 1


@triton.jit
def _logits(ptr, col, n_cols, scale, softcap, SOFTCAP: tl.constexpr):
    """Logits of products, -inf behind the end."""
    z = tl.load(ptr + col, mask=col < n_cols, other=-float("inf")) * scale
    if SOFTCAP:
        # adds 0, or nan where a product is infinite, which the tanh would hide
        z = tl.where(col < n_cols, softcap * (2 * tl.sigmoid(2 * z / softcap) - 1) + 0.0 * z, -float("inf"))
    return z


@triton.jit
def _product_gradient(gradient, z, scale, softcap, SOFTCAP: tl.constexpr):
    """Gradient to products, given that to logits."""
    if SOFTCAP:
        gradient *= 1 - (z / softcap) * (z / softcap)
    return gradient * scale


@triton.jit
def _ln_mean(a, b):
    """ln((e^a + e^b) / 2); -inf where both are."""
    top = tl.maximum(a, b)
    finite = tl.where(top == -float("inf"), 0.0, top)
    return tl.where(top == -float("inf"), top, finite + tl.log((tl.exp(a - finite) + tl.exp(b - finite)) / 2))


@triton.jit
def _vocabulary_rows_kernel(
    std_ptr,
    view_ptr,
    std_out_ptr,
    view_out_ptr,
    label_ptr,
    ce_weight_ptr,
    kl_weight_ptr,
    reference_ptr,
    ce_ptr,
    kl_ptr,
    entropy_ptr,
    is_top1_ptr,
    stride_row,
    stride_out,
    n_cols,
    scale,
    softcap,
    cap,
    SOFTCAP: tl.constexpr,
    HAS_VIEW: tl.constexpr,
    HAS_REFERENCE: tl.constexpr,
    HAS_GRADIENT: tl.constexpr,
    DIRECTION: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One row. Gradients lie over the products: block by block, each is written where all before it has been read."""
    row = tl.program_id(0).to(tl.int64)
    std_ptr += row * stride_row
    std_out_ptr += row * stride_out
    if HAS_VIEW:
        view_ptr += row * stride_row
        view_out_ptr += row * stride_out
    label = tl.load(label_ptr + row)
    labelled = label >= 0
    # each place has a maximum and sums of its own, so that no step waits for other threads; maxima start finite: a
    # column may be -inf, and -inf - -inf is nan. Where a word is left out, it is because its probability is 0, not
    # because it is not above 0: nan is neither, and must reach the loss
    PLACES: tl.constexpr = BLOCK // PARTS
    in_block = tl.arange(0, PARTS)[:, None] * PLACES + tl.arange(0, PLACES)[None, :]  # [PARTS, PLACES]
    top_q = tl.full((PLACES,), -1.0e30, tl.float32)
    sum_q, mean_q = tl.zeros((PLACES,), tl.float32), tl.zeros((PLACES,), tl.float32)
    top_p, sum_p, gap = top_q, sum_q, sum_q
    for start in tl.range(0, n_cols, BLOCK, num_stages=STAGES):
        col = start + in_block
        zq = _logits(std_ptr, col, n_cols, scale, softcap, SOFTCAP)
        new_q = tl.maximum(top_q, tl.max(zq, 0))  # [PLACES]
        eq = tl.exp(zq - new_q[None, :])
        shrink_q = tl.exp(top_q - new_q)
        sum_q = sum_q * shrink_q + tl.sum(eq, 0)
        # sum_v exp(z_v - top) z_v, for the entropy
        mean_q = mean_q * shrink_q + tl.sum(tl.where(eq != 0, eq * zq, 0.0), 0)
        if HAS_VIEW:
            zp = _logits(view_ptr, col, n_cols, scale, softcap, SOFTCAP)
            new_p = tl.maximum(top_p, tl.max(zp, 0))
            ep = tl.exp(zp - new_p[None, :])
            shrink_p = tl.exp(top_p - new_p)
            sum_p = sum_p * shrink_p + tl.sum(ep, 0)
            if DIRECTION == "reverse":
                gap = gap * shrink_p + tl.sum(tl.where(ep != 0, ep * (zp - zq), 0.0), 0)
            elif DIRECTION == "forward":
                gap = gap * shrink_q + tl.sum(tl.where(eq != 0, eq * (zq - zp), 0.0), 0)
            top_p = new_p
        top_q = new_q
    tops_q = top_q  # the places' maxima; below, sums of all places relative to the largest
    top_q = tl.max(tops_q, 0)
    shrink_q = tl.exp(tops_q - top_q)
    sum_q = tl.sum(sum_q * shrink_q, 0)
    mean_q = tl.sum(mean_q * shrink_q, 0)
    lse_q = top_q + tl.log(sum_q)
    mean_gap = 0.0
    factor = 1.0
    if labelled:
        z_label = tl.load(std_ptr + label) * scale
        if SOFTCAP:
            z_label = softcap * (2 * tl.sigmoid(2 * z_label / softcap) - 1)
        ce = lse_q - z_label
        tl.store(ce_ptr + row, ce)
        if HAS_REFERENCE:
            reference = tl.load(reference_ptr + row)
            limited = tl.minimum(tl.exp(reference - ce), cap) + 0.0 * reference
            factor = tl.where(reference != reference, 1.0, limited)
        tl.store(entropy_ptr + row, lse_q - mean_q / sum_q)  # -sum_v q_v (z_v - lse)
        tl.store(is_top1_ptr + row, z_label >= top_q)
    ce_weight = tl.where(labelled, factor * tl.load(ce_weight_ptr + row), 0.0)
    lse_p = 0.0
    kl_weight = 0.0
    if HAS_VIEW:
        tops_p = top_p
        top_p = tl.max(tops_p, 0)
        shrink_p = tl.exp(tops_p - top_p)
        sum_p = tl.sum(sum_p * shrink_p, 0)
        gap = tl.sum(gap * (shrink_p if DIRECTION == "reverse" else shrink_q), 0)
        lse_p = top_p + tl.log(sum_p)
        kl_weight = tl.load(kl_weight_ptr + row)
        if DIRECTION == "reverse":
            kl = gap / sum_p - lse_p + lse_q
            mean_gap = kl
        elif DIRECTION == "forward":
            kl = gap / sum_q - lse_q + lse_p
        else:
            other = 0.0
            for start in tl.range(0, n_cols, BLOCK, num_stages=STAGES):
                col = start + in_block
                lq = _logits(std_ptr, col, n_cols, scale, softcap, SOFTCAP) - lse_q
                lp = _logits(view_ptr, col, n_cols, scale, softcap, SOFTCAP) - lse_p
                lm = _ln_mean(lp, lq)
                p = tl.exp(lp)
                q = tl.exp(lq)
                mean_gap += tl.sum(tl.where(p != 0, p * (lp - lm), 0.0))
                other += tl.sum(tl.where(q != 0, q * (lq - lm), 0.0))
            kl = (mean_gap + other) / 2
        tl.store(kl_ptr + row, tl.where(kl_weight != 0, kl, 0.0))
    for start in tl.range(0, n_cols if HAS_GRADIENT else 0, BLOCK, num_stages=STAGES):
        col = start + in_block
        in_row = col < n_cols
        zq = _logits(std_ptr, col, n_cols, scale, softcap, SOFTCAP)
        q = tl.exp(zq - lse_q)
        std_gradient = (q - tl.where(col == label, 1.0, 0.0)) * ce_weight
        std_gradient = _product_gradient(std_gradient, tl.where(q != 0, zq, 0.0), scale, softcap, SOFTCAP)
        view_gradient = std_gradient
        if HAS_VIEW:
            zp = _logits(view_ptr, col, n_cols, scale, softcap, SOFTCAP)
            lp = zp - lse_p
            p = tl.exp(lp)
            if DIRECTION == "reverse":
                view_gradient = tl.where(p != 0, p * (lp - (zq - lse_q) - mean_gap), 0.0)
            elif DIRECTION == "forward":
                view_gradient = p - q
            else:
                view_gradient = tl.where(p != 0, p * (lp - _ln_mean(lp, zq - lse_q) - mean_gap), 0.0) / 2
            view_gradient = _product_gradient(
                view_gradient * kl_weight, tl.where(p != 0, zp, 0.0), scale, softcap, SOFTCAP
            )
        tl.debug_barrier()  # every thread has read this block, over the first half of which it writes
        tl.store(std_out_ptr + col, std_gradient.to(std_out_ptr.dtype.element_ty), mask=in_row)
        if HAS_VIEW:
            tl.store(view_out_ptr + col, view_gradient.to(view_out_ptr.dtype.element_ty), mask=in_row)


def vocabulary_rows(
    products: torch.Tensor,
    labels: torch.Tensor,
    ce_weight: torch.Tensor,
    kl_weight: torch.Tensor,
    direction: Direction,
    head: HeadOutput,
    dtype: torch.dtype | None,
    ce_reference: torch.Tensor | None = None,
    ce_cap: float = 1.0,
) -> tuple[RowMetrics, torch.Tensor]:
    """`rows.vocabulary_rows` for contiguous float32 products, which the gradient in `dtype` replaces."""
    n_rows, n_cols = len(labels), products.shape[1]
    has_view = len(products) > n_rows
    out = products.view(dtype or products.dtype)[:, :n_cols]  # in 16 bits, the first half of each row of products
    ce, kl, entropy = (torch.zeros(n_rows, dtype=torch.float32, device=products.device) for _ in range(3))
    is_top1 = torch.zeros(n_rows, dtype=torch.bool, device=products.device)
    with torch.cuda.device_of(products):  # Triton launches on the current GPU
        _vocabulary_rows_kernel[(n_rows,)](
            products,
            products[n_rows:] if has_view else None,
            out,
            out[n_rows:] if has_view else None,
            labels,
            ce_weight,
            kl_weight,
            ce_reference,
            ce,
            kl,
            entropy,
            is_top1,
            products.stride(0),
            out.stride(0),
            n_cols,
            head.scale,
            head.softcap or 1.0,
            ce_cap,
            SOFTCAP=head.softcap is not None,
            HAS_VIEW=has_view,
            HAS_REFERENCE=ce_reference is not None,
            HAS_GRADIENT=dtype is not None,
            DIRECTION=direction,
            BLOCK=max(_PARTS, min(_BLOCK, triton.next_power_of_2(n_cols))),
            PARTS=_PARTS,
            STAGES=_STAGES,
            num_warps=_WARPS,
        )
    return RowMetrics(ce, kl, entropy, is_top1, ce_factors(ce, ce_reference, ce_cap)), out
