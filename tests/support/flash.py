"""FlashAttention's functions in plain torch, so that Transformers' own path to them runs on a CPU in any dtype."""

from functools import partial

import pytest
import torch
from torch.nn import functional as F  # noqa: N812
from transformers import modeling_flash_attention_utils as utils
from transformers.utils import import_utils


def _attend(q, k, v, causal, scale, window):
    """One sequence, [n, n_heads, head_dim]; the mask ends at the last key, and the window counts from there."""
    distance = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
    seen = (distance >= 0) | torch.tensor(not causal)
    if window is not None and window[0] >= 0:
        seen = seen & (distance <= window[0])
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    output = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return output[0].transpose(0, 1)


def emulate(monkeypatch):
    """Put the emulation in place; returns the list of calls, "dense" or (ends of queries, ends of keys)."""
    calls = []

    def dense(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=None, **_):
        calls.append("dense")
        return torch.stack(
            [_attend(*sequence, causal, softmax_scale, window_size) for sequence in zip(q, k, v, strict=True)]
        )

    def varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=None, causal=False,
        window_size=None, **_,
    ):  # fmt: skip
        queries, keys = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
        calls.append((queries, keys))
        assert max(b - a for a, b in zip(queries, queries[1:], strict=False)) == max_seqlen_q
        assert max(b - a for a, b in zip(keys, keys[1:], strict=False)) == max_seqlen_k
        assert queries[-1] == len(q) and keys[-1] == len(k)
        spans = zip(zip(queries, queries[1:], strict=False), zip(keys, keys[1:], strict=False), strict=True)
        parts = [_attend(q[a:b], k[c:d], v[c:d], causal, softmax_scale, window_size) for (a, b), (c, d) in spans]
        return torch.cat(parts)

    allowed = dict.fromkeys(
        ("dropout_p", "window_size", "deterministic", "softcap", "s_aux", "learnable_sink", "block_table", "page_table",
         "cache_seqlens", "max_seqlen_q", "max_seqlen_k"),
        False,
    )  # fmt: skip
    allowed |= dict.fromkeys(("dropout_p", "window_size", "max_seqlen_q", "max_seqlen_k"), True)
    process = partial(utils._process_flash_attention_kwargs, supports_mapping=allowed)
    functions = (dense, varlen, None, utils._pad_input, utils._unpad_input)
    # Transformers 5.17 has one, later versions have another for attention to a cache
    both = (process, process) if hasattr(utils, "_process_with_kvcache_kwargs_fn") else process
    monkeypatch.setattr(utils, "lazy_import_flash_attention", lambda *_, **__: (functions, both))
    monkeypatch.setattr("transformers.integrations.flash_attention._use_top_left_mask", False)
    return calls


def as_flash(model):
    """The model on the emulated FlashAttention, which Transformers would refuse to load here."""
    model.config._attn_implementation_internal = "flash_attention_2"
    return model


def require(attention):
    """Skip the test that calls this unless the package of a FlashAttention is installed; others always run."""
    number = attention.removeprefix("flash_attention_")
    if number != attention and not getattr(import_utils, f"is_flash_attn_{number}_available", lambda: False)():
        pytest.skip(f"{attention} is not installed")
