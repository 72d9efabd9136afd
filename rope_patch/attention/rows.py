"""Causal attention within the documents of rows without n x n masks, in training and in inference.

Under SDPA Transformers makes such a mask for layers with a sliding window, for packed rows and for padded rows. At
131072 tokens it takes 16 GiB, and 32 GiB more where it is added to scores in 16 bits; and all pairs of tokens are
multiplied.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from ..families.attention_calls import AttentionCall, attention_kernel, sliding_window, watched_attention
from ..families.capabilities import keeps_from_attention
from ..families.local_layers import other_layer_types
from ..forward.cache_arguments import cache_of
from ..layout.labelled import Labelled
from ..rope.rotary import find_causal_lm, find_decoder
from .masks import finished_mask
from .sequences import by_token, with_gaps
from .windowed import WindowedAttention

ROWS = "documents_of_rows"
"""Name of the keyword argument that carries the places of documents through a model to its attention."""


def why_masks_stay(model: nn.Module) -> str | None:
    """Why a model's attention needs the masks of Transformers; None if documents and windows are all that they hold.

    Args:
        model: bare or wrapped.
    """
    causal_lm, decoder = find_causal_lm(model), find_decoder(model)
    kernel, config = attention_kernel(causal_lm), decoder.config
    if kernel != "sdpa":
        return f"attention is not sdpa's but {kernel or 'of another kind'}."
    if other := other_layer_types(config):
        return f"it has layers of type {other}."
    keeps = keeps_from_attention(decoder)
    if keeps is not None:
        return f"{keeps}."
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return "its attention scores are soft-capped."
    if any(getattr(module, "is_causal", True) is False for module in decoder.modules()):
        return "its attention is not causal."
    return None


class _Spans:
    """The places of the documents of a batch. Not a dataclass, because wrappers of layers rebuild these.

    Args:
        spans: (row, first token, number of tokens) of each document; they do not overlap.
        batch: number of rows.
        n: tokens in a row, with padding.
        windowed: computes the attention.
    """

    def __init__(self, spans: Sequence[tuple[int, int, int]], batch: int, n: int, windowed: WindowedAttention) -> None:
        self.spans, self.batch, self.n, self.windowed = spans, batch, n, windowed

    def attend(self, call: AttentionCall, window: int | None) -> torch.Tensor:
        """Output [batch, n, n_heads, value_dim] of a layer, 0 on padding."""
        how = (window, call.scale, call.options.get("dropout", 0.0))
        documents = {row * self.n + first: size for row, first, size in self.spans}  # by place in the flattened batch
        sizes = with_gaps(documents, self.batch * self.n)  # with padding
        if self.batch == 1 and list(sizes.values()) == [self.n]:
            return self.windowed.causal(call.query, call.key, call.value, *how).transpose(1, 2)
        # [size, heads, d] each. One split, because the backward of each separate slice makes a tensor of the whole size
        pieces = [by_token(x).split(list(sizes.values())) for x in (call.query, call.key, call.value)]
        shape = (call.query.shape[1], call.value.shape[-1])
        out = []
        for place, q, k, v in zip(sizes, *pieces, strict=True):
            if place not in documents:  # padding
                out.append(call.value.new_zeros(q.shape[0], *shape))
                continue
            q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, heads, size, head_dim]
            out.append(self.windowed.causal(q, k, v, *how)[0].transpose(0, 1))
        return torch.cat(out).view(self.batch, self.n, *shape)


class MaskFreeRows:
    """Inside `active()`, forwards over whole rows attend within documents and windows without n x n masks.

    Forwards with a KV cache, with finished masks, or with position IDs of several axes do not change.

    Args:
        model: bare or wrapped.
        *others: more models with the same attention, such as a copy that teaches.
        least: rows with fewer tokens keep their masks, which are small.

    Raises:
        ValueError: the model needs its masks, for the reason of `why_masks_stay`.
    """

    def __init__(self, model: nn.Module, *others: nn.Module, least: int = 0) -> None:
        reason = why_masks_stay(model)
        if reason is not None:
            raise ValueError(f"rows cannot be read without masks in {type(find_causal_lm(model)).__name__}: {reason}")
        self.least = least
        self.causal_lm: Any = find_causal_lm(model)
        self.decoders: list[Any] = [find_decoder(one) for one in (model, *others)]
        config = self.decoders[0].config
        self.window: int | None = getattr(config, "sliding_window", None)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Keep it open during forward and backward, which runs checkpointed layers again.

        Open it outside of other watchers of the attention, so that these look first.
        """
        self._windowed = WindowedAttention()
        with ExitStack() as stack:
            for decoder in self.decoders:
                # after the hook that draws a view, which reads from the mask which tokens are padding
                handle = decoder.register_forward_pre_hook(self._send_spans, with_kwargs=True)
                stack.callback(handle.remove)
            stack.enter_context(watched_attention(self.causal_lm, self._attend))
            yield

    def _send_spans(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        ids, mask, positions = (kwargs.get(name) for name in ("input_ids", "attention_mask", "position_ids"))
        if ids is None and args:
            ids, args, kwargs = args[0], args[1:], {**kwargs, "input_ids": args[0]}  # as GPT-NeoX passes them
        has_row_mask = mask is None or (isinstance(mask, torch.Tensor) and mask.ndim == 2)
        has_row_positions = positions is None or positions.ndim == 2
        if args or cache_of(kwargs) is not None or not (has_row_mask and has_row_positions):
            return None
        if ids is None:
            embeds: Any = kwargs["inputs_embeds"]
            ids = torch.zeros(embeds.shape[:2], dtype=torch.int64, device=embeds.device)  # only its shape counts
        batch, n = ids.shape
        if n < self.least:
            return None
        spans = [(row, 0, n) for row in range(batch)]
        if positions is not None or mask is not None:
            spans = Labelled.of({"input_ids": ids, "attention_mask": mask, "position_ids": positions}).spans
        if all(size == n for _, _, size in spans) and len(spans) == batch and (self.window or n) >= n:
            return None  # plain causal attention, for which Transformers makes no mask
        sent = _Spans(spans, batch, n, self._windowed)
        return args, {**kwargs, "attention_mask": finished_mask(batch, ids.device), "use_cache": False, ROWS: sent}

    def _attend(self, call: AttentionCall) -> torch.Tensor | None:
        spans: _Spans | None = call.options.pop(ROWS, None)
        return None if spans is None else spans.attend(call, sliding_window(call, self.decoders[0].config))
