"""Causal attention of tokens to a prefix and to themselves, with the kernel that PyTorch runs for plain attention."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from rope_kernels.common.autocast import as_multiplied

_ATEN = torch.ops.aten


# kernel by which PyTorch computes plain causal attention -> type of device on which we call it for each part
_KERNELS = {"cuda": SDPBackend.CUDNN_ATTENTION.value, "cpu": SDPBackend.FLASH_ATTENTION.value}
_ROUND = 1024  # tokens
_UNPLANNED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]  # need no plans


def kernels_for(query: torch.Tensor, key: torch.Tensor) -> AbstractContextManager[None]:
    """Rule out cuDNN unless the tokens of query and key are multiples of 1024.

    cuDNN is the fastest, but makes a plan for each new shape, which takes longer than attention of a short prompt does
    (`benchmarks/eval_speed.py`). Prompts have all lengths.

    Args:
        query: [batch, n_heads, n, head_dim].
        key: [batch, n_kv_heads, n_keys, head_dim].
    """
    if query.is_cuda and (query.shape[2] % _ROUND or key.shape[2] % _ROUND):
        kernels: AbstractContextManager[None] = sdpa_kernel(_UNPLANNED)
        return kernels
    return nullcontext()


def prefix_attention(
    query: torch.Tensor,
    prefix_key: torch.Tensor,
    prefix_value: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """softmax(scale [q K_prefix^T, causal q K^T]) [V_prefix; V].

    PyTorch has a causal mask that ends at the last key only in FlashAttention-2. If another kernel is faster for plain
    attention, as cuDNN's is on a Hopper GPU, that kernel runs twice: for the prefix, and for the tokens. With outputs
    o_i and logs of row sums l_i of the two parts, and l = ln(e^l_1 + e^l_2):

        o = e^(l_1 - l) o_1 + e^(l_2 - l) o_2

    The backward of each part, given o and l in place of o_i and l_i, is that of the whole: with P = e^(S - l) it
    computes dS = P (dO V^T - rowsum(dO o)).

    Args:
        query: [batch, n_heads, n, head_dim].
        prefix_key: [batch, n_kv_heads, n_prefix, head_dim]; every query sees all of them.
        prefix_value: [batch, n_kv_heads, n_prefix, value_dim].
        key: [batch, n_kv_heads, n, head_dim]; query i sees those up to i.
        value: [batch, n_kv_heads, n, value_dim].
        scale: of the products.

    Returns:
        [batch, n_heads, n, value_dim].
    """
    # autocast does this for plain attention, where rotated queries and keys are float32 and values are not
    query, prefix_key, prefix_value, key, value = map(as_multiplied, (query, prefix_key, prefix_value, key, value))
    shared = query.shape[1] != key.shape[1]
    if not prefix_key.shape[2]:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=shared)
    if is_read_in_parts(query, key, value, scale):
        output: torch.Tensor = _Merged.apply(query, prefix_key, prefix_value, key, value, scale)
        return output
    mask: Any = causal_lower_right(query.shape[2], prefix_key.shape[2] + key.shape[2])
    key, value = torch.cat([prefix_key, key], 2), torch.cat([prefix_value, value], 2)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=shared)


def is_read_in_parts(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> bool:
    """Whether `prefix_attention` of these tokens calls a kernel for each part, which needs no copy of the prefix."""
    shared = query.shape[1] != key.shape[1]
    choice = torch._fused_sdp_choice(query, key, value, None, 0.0, True, scale=scale, enable_gqa=shared)
    return _KERNELS.get(query.device.type) == choice


class _Merged(torch.autograd.Function):
    """Two calls of a kernel under one softmax."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        prefix_key: torch.Tensor,
        prefix_value: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        # not causal: every query sees the whole prefix
        far, log_far, rest_far = _forward(query, prefix_key, prefix_value, False, scale)
        near, log_near, rest_near = _forward(query, key, value, True, scale)
        log_sum = torch.logaddexp(log_far, log_near)  # [batch, n_heads, n]
        output = _rows(log_far - log_sum, far) * far + _rows(log_near - log_sum, near) * near
        output = output.to(near.dtype)  # logs are float32
        ctx.save_for_backward(query, prefix_key, prefix_value, key, value, output, log_sum)
        ctx.rest, ctx.scale = (rest_far, rest_near), scale
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, prefix_key, prefix_value, key, value, output, log_sum = ctx.saved_tensors
        rest_far, rest_near = ctx.rest
        grad_far = _backward(grad, query, prefix_key, prefix_value, output, log_sum, rest_far, False, ctx.scale)
        grad_near = _backward(grad, query, key, value, output, log_sum, rest_near, True, ctx.scale)
        # the query is in both parts; the scale has no gradient
        return grad_far[0] + grad_near[0], *grad_far[1:], *grad_near[1:], None


def _forward(q: Any, k: Any, v: Any, causal: bool, scale: float) -> tuple[Any, Any, tuple[Any, ...]]:
    """Output, log of each row's sum of exponentials, and what else the backward needs."""
    if not q.is_cuda:
        return *_ATEN._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale), ()
    # after v: bias, whether to return log_sum, dropout, causal, whether to return a debug mask
    output, log_sum, ends_q, ends_k, n_q, n_k, seed, offset, _ = _ATEN._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, causal, False, scale=scale
    )
    return output, log_sum, (seed, offset, None, ends_q, ends_k, n_q, n_k)  # None: the bias


def _backward(
    grad: Any, q: Any, k: Any, v: Any, output: Any, log_sum: Any, rest: tuple[Any, ...], causal: bool, scale: float
) -> Any:
    """Gradients of query, key and value."""
    call = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward
    if q.is_cuda:
        call = _ATEN._scaled_dot_product_cudnn_attention_backward
    return call(grad, q, k, v, output, log_sum, *rest, 0.0, causal, scale=scale)  # 0.0: dropout


def _rows(log_share: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Shares of rows, [batch, n_heads, n] or cuDNN's [batch, n_heads, n, 1], to multiply [batch, n_heads, n, d]."""
    return log_share.exp().view(*like.shape[:3], 1)
