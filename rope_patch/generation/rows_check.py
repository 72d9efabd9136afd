"""Check that a model gives the same logits with `KVRows` as with its own cache."""

from typing import Any

import torch

from ..attention.rounding import SAMPLES, differs_by_rounding, inputs_rounded_otherwise
from ..forward.cache_arguments import cache_argument, returned_cache
from .kv_rows import KVRows

_CHECKED = 24  # tokens
_PARTS = (12, 20, 22, 23)  # where each part ends; the last two parts have one token


def bytes_if_alike(causal_lm: Any) -> int:
    """Bytes of keys and values of a token if `KVRows` gives the model's logits, else -1.

    It does if its logits are as near to those of a plain forward as logits with the model's own cache are. On a GPU
    these two may round alike, and `KVRows` differently. Then its logits may differ as much as they do after rounding
    the embeddings, provided that swapping two tokens moves logits more than twice as far.
    """
    vocab_size = causal_lm.get_output_embeddings().weight.shape[0]
    device = causal_lm.get_input_embeddings().weight.device
    # [SAMPLES, 24]: each row goes through the vocabulary by a step of its own
    steps = 7919 + 2 * 104729 * torch.arange(SAMPLES, device=device)
    ids = torch.outer(steps, torch.arange(1, _CHECKED + 1, device=device)) % vocab_size
    plain = _plain(causal_lm, ids)
    try:
        known = _by_own_cache(causal_lm, ids)
        rows = KVRows(causal_lm, 2 * SAMPLES, _CHECKED)
        with rows.attention():
            by_rows = _by_rows(rows, ids)
            if by_rows.shape != plain.shape or not rows.calls:
                return -1
            if differs_by_rounding(by_rows, plain, known):
                return rows.bytes_per_token
        with inputs_rounded_otherwise(causal_lm):
            moved = _plain(causal_lm, ids)
        order = torch.arange(_CHECKED, device=device)
        order[[_PARTS[1] - 2, _PARTS[1] - 1]] = order[[_PARTS[1] - 1, _PARTS[1] - 2]]
        misplaced = _plain(causal_lm, ids[:, order])
    except torch.OutOfMemoryError:
        raise
    except Exception:  # a family with other arguments, which its own `generate` knows
        return -1
    alike = differs_by_rounding(by_rows, plain, moved) and not differs_by_rounding(misplaced, plain, by_rows)
    return rows.bytes_per_token if alike else -1


def _plain(causal_lm: Any, ids: torch.Tensor) -> torch.Tensor:
    """Logits after ids [n, 24] by one forward, [n, vocab_size]."""
    logits: torch.Tensor = causal_lm(input_ids=ids, use_cache=False, logits_to_keep=1).logits[:, -1]
    return logits


def _by_own_cache(causal_lm: Any, ids: torch.Tensor) -> torch.Tensor:
    """Logits after ids [n, 24], read in parts with the model's cache, [n, vocab_size]."""
    cache, begin = None, 0
    for end in (*_PARTS, _CHECKED):
        cached = cache_argument(causal_lm, cache)
        out = causal_lm(input_ids=ids[:, begin:end], **cached, use_cache=True, logits_to_keep=1)
        cache, begin = returned_cache(out), end
    logits: torch.Tensor = out.logits[:, -1]
    return logits


def _by_rows(rows: KVRows, ids: torch.Tensor) -> torch.Tensor:
    """Logits after ids [n, 24], by rows that copy the beginning of another row, [n, vocab_size]."""
    n, (chunk, copied, read, _) = len(ids), _PARTS
    rows.read(ids[:, :copied], 0, 0, chunk)
    for row in range(n):
        rows.copy_prefix(row, n + row, n + row + 1, copied)
    rows.read(ids[:, copied:read].repeat(2, 1), 0, copied, chunk=8)
    for place in range(read, _CHECKED):
        logits = rows.decode(ids[:, place].repeat(2), torch.full((2 * n,), place, device=ids.device))
    return logits[n:]  # of the rows that were copied to
