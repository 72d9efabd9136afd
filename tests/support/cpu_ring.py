"""Torch's ring attention on a CPU: it has handlers for kernels of GPUs alone, and here is one for the CPU's."""

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental._context_parallel import _attention as ring

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def install() -> None:
    """Let `context_parallel` run on CPUs in this process, by torch's own templates of the ring."""
    ring.custom_ops |= {_FORWARD.default: _handle, _BACKWARD.default: _handle}


def _handle(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, ...]:
    mesh = args[0].device_mesh
    local = [x.to_local() if isinstance(x, DTensor) else x for x in args]
    if op is _FORWARD.default:
        query, key, value, _, is_causal = local
        results = ring._templated_ring_attention(
            mesh.get_group(),
            2,
            _FORWARD,
            query=query,
            key=key,
            value=value,
            is_causal=is_causal,
            dropout_p=0.0,
            **kwargs,
        )
    else:
        grad_out, query, key, value, out, logsumexp, _, is_causal = local
        results = ring._templated_ring_attention_backward(
            mesh.get_group(),
            2,
            _BACKWARD.default,
            grad_out=grad_out,
            grad_out_name="grad_out",
            query=query,
            key=key,
            value=value,
            out=out,
            logsumexp=logsumexp,
            is_causal=is_causal,
            dropout_p=0.0,
            **kwargs,
        )
    return tuple(DTensor.from_local(x, mesh, [Shard(2)], run_check=False) for x in results)
