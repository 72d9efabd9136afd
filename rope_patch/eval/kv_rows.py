"""Keys and values of several prompts in fixed buffers, and the attention that reads them without masks of n x n.

Transformers' own caches either grow, so that no CUDA graph can hold a step of decoding, or are static and then make
attention take a mask, which keeps it from its fast kernels and repeats keys for every query head.
"""

import math
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention.bias import causal_lower_right
from transformers import Cache, DynamicLayer

from rope_kernels import decode_attention

from ..attention_calls import AttentionCall, sliding_window, watched_attention

_WINDOW_BLOCK = 1024  # queries that look through one window at once: shorter ones launch more, longer ones see less


class NotPlainAttention(Exception):
    """A layer wants more than causal attention over all tokens or the last ones."""


class KVRows:
    """Buffers for `n_rows` prompts of up to `capacity` tokens, and what the forward in flight reads and writes.

    Args:
        core: a causal LM with SDPA attention.
        n_rows: prompts that are held at once.
        capacity: tokens of a prompt and its answer.
    """

    def __init__(self, core: Any, n_rows: int, capacity: int) -> None:
        self.core, self.n_rows, self.capacity = core, n_rows, capacity
        self.config = core.config.get_text_config(decoder=True)
        self.first, self.last, self.begin = 0, n_rows, 0
        self.slots: torch.Tensor | None = None  # of the tokens to be decoded, one a row; None while prompts are read
        self.index = torch.arange(n_rows, device=core.get_input_embeddings().weight.device)
        self.layers = [_Layer(self) for _ in range(self.config.num_hidden_layers)]
        self.cache = Cache(layers=list(self.layers))
        self.calls = 0
        self._modules = {id(module) for module in core.modules()}
        self._visible: dict[tuple[int, int, int], torch.Tensor] = {}

    @property
    def bytes_per_token(self) -> int:
        """Of keys and values of one token in all layers, once a forward has filled any."""
        held = sum(x.nbytes for layer in self.layers for x in (layer.keys, layer.values) if x is not None)
        return math.ceil(held / (self.n_rows * self.capacity))

    def read(self, ids: torch.Tensor, first: int, begin: int, chunk: int, *, keep: int = 1) -> torch.Tensor:
        """Read tokens begin, begin + 1, ... of rows first, first + 1, ..., whose earlier tokens are there.

        Args:
            ids: the tokens, [rows, n].
            first: row of ids[0].
            begin: place of ids[:, 0] in its prompt.
            chunk: tokens of each row read in one forward.
            keep: tokens at the end of the last forward whose logits are returned.

        Returns:
            Logits of what follows each of these tokens, [rows, keep, vocab_size].
        """
        self.slots, self.first, self.last = None, first, first + len(ids)
        for part in ids.split(chunk, dim=1):
            self.begin = begin
            positions = torch.arange(begin, begin + part.shape[1], device=ids.device).expand(part.shape)
            logits = self._forward(part, positions, keep)
            begin += part.shape[1]
        return logits

    def decode(self, token: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Logits [rows, vocab_size] after one more token of each row from the first on.

        Args:
            token: ids, [rows].
            slots: place of each in its row, [rows] int64.
        """
        self.slots, self.begin = slots, 1  # 1: some families ask whether the cache is empty
        return self._forward(token[:, None], slots[:, None], 1)[:, 0]

    def copy_prefix(self, source: int, first: int, last: int, n_tokens: int) -> None:
        """Give rows first, ..., last - 1 the first tokens of row `source`."""
        for layer in self.layers:
            for held in (layer.keys, layer.values):
                if held is not None:
                    for row in range(first, last):
                        if row != source:
                            held[row, :, :n_tokens] = held[source, :, :n_tokens]

    @contextmanager
    def attention(self) -> Iterator[None]:
        """Let the model attend as the rows need it; `read` and `decode` are called inside."""
        with watched_attention(self.core, self._attend):
            yield

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, keep: int) -> torch.Tensor:
        # a mask of four dimensions is taken for a finished one: none of n x n is made, and ours sees what is visible
        finished = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=ids.device)
        output = self.core(
            input_ids=ids,
            attention_mask=finished,
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=keep,
        )
        logits: torch.Tensor = output.logits
        return logits

    def _attend(self, call: AttentionCall) -> torch.Tensor | None:
        if id(call.module) not in self._modules:
            return None  # another model, in another thread
        self.calls += 1
        causal = call.options.get("is_causal")
        causal = getattr(call.module, "is_causal", True) if causal is None else causal
        if not causal or any(call.options.get(name) is not None for name in ("softcap", "s_aux", "position_bias")):
            raise NotPlainAttention
        window = sliding_window(call, self.config)
        if self.slots is not None:
            end = self.slots.to(call.key.device) + 1
            begin = torch.zeros_like(end) if window is None else (end - window).clamp(min=0)
            return decode_attention(call.query[:, :, 0], call.key, call.value, begin, end, call.scale)[:, None]
        if window is None or call.key.shape[2] <= window:
            return _causal(call.query, call.key, call.value, call.scale).transpose(1, 2)
        return self._windowed(call, window).transpose(1, 2)

    def _windowed(self, call: AttentionCall, window: int) -> torch.Tensor:
        """Attention of each query to itself and the `window` - 1 tokens before it, block by block of queries."""
        n, n_keys = call.query.shape[2], call.key.shape[2]
        out = []
        for first in range(0, n, max(window, _WINDOW_BLOCK)):
            q = call.query[:, :, first : first + max(window, _WINDOW_BLOCK)]
            last_key = n_keys - n + first + q.shape[2]
            first_key = max(last_key - q.shape[2] - window + 1, 0)
            k, v = (_repeated(x[:, :, first_key:last_key], q.shape[1]) for x in (call.key, call.value))
            visible = self._visible_in(window, q.shape[2], last_key - first_key, q.device)
            out.append(F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=call.scale))
        return torch.cat(out, 2)

    def _visible_in(self, window: int, n: int, n_keys: int, device: torch.device) -> torch.Tensor:
        """[n, n_keys], whether a query sees a key, where the last of both is the same token."""
        key = (window, n, n_keys)
        if key not in self._visible:
            distance = torch.arange(n_keys - n, n_keys, device=device)[:, None] - torch.arange(n_keys, device=device)
            self._visible[key] = (distance >= 0) & (distance < window)
        return self._visible[key].to(device)


class _Layer(DynamicLayer):
    """One layer's buffers, [n_rows, n_kv_heads, capacity, head_dim], made when the first keys come."""

    def __init__(self, rows: KVRows) -> None:
        super().__init__()
        self.rows: KVRows = weakref.proxy(rows)  # a cycle would hold gigabytes until the garbage collector comes by

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write, and return all that the rows of the forward hold."""
        rows = self.rows
        if self.keys is None:
            self.keys, self.values = (
                x.new_zeros(rows.n_rows, x.shape[1], rows.capacity, x.shape[3]) for x in (key_states, value_states)
            )
            self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
        assert self.keys is not None and self.values is not None
        if rows.slots is None:
            here, end = slice(rows.first, rows.last), rows.begin + key_states.shape[2]
            self.keys[here, :, rows.begin : end] = key_states
            self.values[here, :, rows.begin : end] = value_states
            return self.keys[here, :, :end], self.values[here, :, :end]
        n = len(key_states)
        row, slot = rows.index[:n].to(self.device), rows.slots.to(self.device)
        self.keys[row, :, slot] = key_states[:, :, 0]
        self.values[row, :, slot] = value_states[:, :, 0]
        return self.keys[:n], self.values[:n]

    def get_seq_length(self) -> int:
        """Tokens that the rows of the forward hold before it."""
        return self.rows.begin


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Attention of the last tokens q to all of k and v up to themselves, [batch, n_heads, n, value_dim].

    SDPA's own `is_causal` counts queries from the first key on, and a mask would keep it from flash attention.
    """
    n, n_keys = q.shape[2], k.shape[2]
    grouped = q.shape[1] != k.shape[1]
    # other kernels than flash attention repeat keys themselves, the slow one in full precision
    grouped = grouped and q.is_cuda and _can_use_flash(q, k, v)
    if not grouped:
        k, v = _repeated(k, q.shape[1]), _repeated(v, q.shape[1])
    if n == n_keys:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
    bias: Any = causal_lower_right(n, n_keys)
    out: torch.Tensor = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale, enable_gqa=grouped)
    return out


def _can_use_flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    parameters = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, False, True)
    return torch.backends.cuda.can_use_flash_attention(parameters)


def _repeated(x: torch.Tensor, n_heads: int) -> torch.Tensor:
    """Each of the heads of keys or values as often as query heads share it."""
    return x if x.shape[1] == n_heads else x.repeat_interleave(n_heads // x.shape[1], dim=1)
