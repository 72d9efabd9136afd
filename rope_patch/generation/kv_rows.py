"""A KV cache of fixed buffers for several prompts, and the attention that reads it without masks of n x n.

Transformers has dynamic caches, which grow, so that no CUDA graph can hold a step of decoding, and static ones, which
need a mask: attention then misses its fast kernels and repeats keys for every query head.
"""

import math
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import Cache, DynamicLayer

from rope_kernels import decode_attention
from rope_kernels.common.autocast import as_multiplied

from ..attention.masks import finished_mask
from ..attention.plain import Windows, require_plain
from ..families.attention_calls import AttentionCall, sliding_window, watched_attention
from ..forward.cache_arguments import cache_argument
from ..rope.rotary import frequencies_kept


class KVRows:
    """Buffers for `n_rows` prompts of up to `capacity` tokens, and which part of them the running forward reads.

    Args:
        causal_lm: a causal LM with SDPA attention.
        n_rows: prompts that are held at once.
        capacity: most tokens of a prompt with its reply.
    """

    def __init__(self, causal_lm: Any, n_rows: int, capacity: int) -> None:
        self.causal_lm, self.n_rows, self.capacity = causal_lm, n_rows, capacity
        self.config = causal_lm.config.get_text_config(decoder=True)
        self.first, self.last, self.begin = 0, n_rows, 0  # rows of the running forward, and tokens they hold before it
        self.slots: torch.Tensor | None = None  # [rows], index of the token that each row decodes; None in `read`
        self.index = torch.arange(n_rows, device=causal_lm.get_input_embeddings().weight.device)
        self.layers = [_Layer(self) for _ in range(self.config.num_hidden_layers)]
        self._cache = cache_argument(causal_lm, Cache(layers=list(self.layers)))
        self.calls = 0  # of attention
        self._modules = {id(module) for module in causal_lm.modules()}
        self._windows = Windows()

    @property
    def bytes_per_token(self) -> int:
        """Bytes of keys and values of one token in all layers, after a forward has made the buffers."""
        held = sum(x.nbytes for layer in self.layers for x in (layer.keys, layer.values) if x is not None)
        return math.ceil(held / (self.n_rows * self.capacity))

    def read(self, ids: torch.Tensor, first: int, begin: int, chunk: int, *, keep: int = 1) -> torch.Tensor:
        """Read tokens begin, begin + 1, ... of rows first, first + 1, ..., which hold the earlier tokens.

        Args:
            ids: the tokens, [rows, n].
            first: row of ids[0].
            begin: index of ids[:, 0] in its prompt.
            chunk: tokens of each row that one forward reads. Forwards end at its multiples.
            keep: number of last tokens whose logits are returned, at most those of the last forward.

        Returns:
            Logits of the next token after each of these, [rows, keep, vocab_size].
        """
        self.slots, self.first, self.last = None, first, first + len(ids)
        start, stop = begin, begin + ids.shape[1]
        for end in (*range((begin // chunk + 1) * chunk, stop, chunk), stop):
            part, self.begin = ids[:, begin - start : end - start], begin
            positions = torch.arange(begin, end, device=ids.device).expand(part.shape)
            logits = self._forward(part, positions, keep)
            begin = end
        return logits

    def decode(self, token: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Logits [rows, vocab_size] after one more token of rows 0, 1, ...

        Args:
            token: IDs, [rows].
            slots: index of each in its row, [rows] int64.
        """
        self.slots, self.begin = slots, 1  # 1: some families ask whether the cache is empty
        return self._forward(token[:, None], slots[:, None], 1)[:, 0]

    def end(self, prompts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Read the last tokens of prompts that rows 0, 1, ... hold otherwise; logits after them, [rows, vocab_size].

        So prompts of several lengths can be read together, with padding on the right: no token of a prompt sees it, and
        decoding overwrites it.
        """
        token = torch.stack([prompt[-1] for prompt in prompts])
        return self.decode(token, torch.tensor([len(prompt) - 1 for prompt in prompts], device=token.device))

    def copy_prefix(self, source: int, first: int, last: int, n_tokens: int) -> None:
        """Copy the first tokens of row `source` to rows first, ..., last - 1."""
        for layer in self.layers:
            for held in (layer.keys, layer.values):
                if held is not None:
                    for row in range(first, last):
                        if row != source:
                            held[row, :, :n_tokens] = held[source, :, :n_tokens]

    @contextmanager
    def attention(self) -> Iterator[None]:
        """Replace the model's attention; `read` and `decode` are called inside."""
        with watched_attention(self.causal_lm, self._attend), frequencies_kept(self.causal_lm):
            yield

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, keep: int) -> torch.Tensor:
        output = self.causal_lm(
            input_ids=ids,
            attention_mask=finished_mask(1, ids.device),
            position_ids=positions,
            **self._cache,
            use_cache=True,
            logits_to_keep=keep,
        )
        logits: torch.Tensor = output.logits
        return logits

    def _attend(self, call: AttentionCall) -> torch.Tensor | None:
        if id(call.module) not in self._modules:
            return None  # of another model, in another thread
        self.calls += 1
        require_plain(call)
        window = sliding_window(call, self.config)
        if self.slots is not None:
            # key and value are whole buffers, [rows, n_kv_heads, capacity, d]; a row sees begin <= j < end, [rows] each
            end = self.slots.to(call.key.device) + 1
            begin = torch.zeros_like(end) if window is None else (end - window).clamp(min=0)
            query = as_multiplied(call.query[:, :, 0])  # [rows, n_heads, head_dim]
            return decode_attention(query, call.key, call.value, begin, end, call.scale)[:, None]
        return self._windows.attend(call, window)


class _Layer(DynamicLayer):
    """One layer's keys and values, [n_rows, n_kv_heads, capacity, head_dim] each, made by the first forward."""

    def __init__(self, rows: KVRows) -> None:
        super().__init__()
        self.rows: KVRows = weakref.proxy(rows)  # a cycle would hold gigabytes until the garbage collector comes by

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new states in autocast's dtype, and return all that the rows of the forward hold."""
        rows = self.rows
        key_states, value_states = as_multiplied(key_states), as_multiplied(value_states)
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
            return self.keys[here, :, :end], self.values[here, :, :end]  # [rows, n_kv_heads, end, d]
        n = len(key_states)
        row, slot = rows.index[:n].to(self.device), rows.slots.to(self.device)
        self.keys[row, :, slot] = key_states[:, :, 0]  # [n, n_kv_heads, head_dim]
        self.values[row, :, slot] = value_states[:, :, 0]
        return self.keys[:n], self.values[:n]  # [n, n_kv_heads, capacity, d]

    def get_seq_length(self) -> int:
        """Tokens that the rows hold before the forward."""
        return self.rows.begin
