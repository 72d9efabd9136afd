"""STRING: at inference, replace long distances, which training rarely showed, by shorter ones."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..base.validators import require_integer
from ..families.attention_calls import AttentionCall, attention_name, sliding_window, watched_attention
from ..families.capabilities import keeps_from_attention, why_not_relative
from ..forward.cache_arguments import cache_of, tokens_in
from ..forward.state import has_view
from ..layout.documents import locate_documents
from ..rope.rotary import (
    depends_on_length,
    find_causal_lm,
    find_decoder,
    named_rotary_modules,
    parameter_names,
    rope_types,
)
from .masks import additive_mask

PLAN = "string_positions_plan"
"""Name of the keyword argument that carries a forward's `_Plan` to its attention."""

_MASK_ENTRIES = 2**25  # queries by keys of one call of attention


@contextmanager
def string_positions(model: nn.Module, *, offset: int | None = None, local: int = 128) -> Iterator[None]:
    """Inside the block, RoPE sees a distance m = i - j of tokens as m for m < S, and as m - S + W for m >= S.

    The largest distance of n tokens is then n - 1 - S + W, and the S - W largest distances of the context window are
    never used. Keys that are far from a query are rotated by S - W more positions, which shortens the distance for
    RoPE; one softmax covers all scores of a query. Keys in the cache do not change, so that prompts, decoding and
    batched generation work, and the model is as before when the block ends.

    Args:
        model: bare or wrapped, in evaluation mode, with SDPA or eager attention; with RoPE scaling or without.
        offset: S, in positions, above W; None takes a third of the model's context window, as the paper does.
        local: W, in positions, at least 0.

    Raises:
        ValueError: a model in training mode or under a view, another attention implementation, RoPE parameters that
            depend on length or layer, keys that RoPE does not rotate as a whole or that get weights after it, caches
            of a fixed size, or sliding windows above S.

    Source: STRING, arXiv:2410.18745; S = L / 3 and W = 128 are the defaults of its code.
    """
    shifted = _StringPositions(model, offset, local)
    handle = shifted.decoder.register_forward_pre_hook(shifted.plan, with_kwargs=True)
    try:
        with watched_attention(shifted.causal_lm, shifted.attend):
            yield
    finally:
        handle.remove()


def string_in_force(model: nn.Module) -> tuple[int, int] | None:
    """(offset, local) of the `string_positions` block that `model` is in; None outside of one."""
    for hook in find_decoder(model)._forward_pre_hooks.values():
        owner = getattr(hook, "__self__", None)
        if isinstance(owner, _StringPositions):
            return owner.offset, owner.local
    return None


@dataclass(frozen=True)
class _Plan:
    """What the attention of a forward needs to know.

    Args:
        cached: tokens in the cache.
        document: number of each token's document, cached tokens first, -1 on padding, [batch, tokens]; None if each row
            is one document.
        turn: cosine and sine by which far keys are rotated.
    """

    cached: int
    document: torch.Tensor | None
    turn: tuple[torch.Tensor, torch.Tensor]


class _StringPositions:
    def __init__(self, model: nn.Module, offset: int | None, local: int) -> None:
        self.causal_lm: Any = find_causal_lm(model)
        self.decoder: Any = find_decoder(model)
        config = self.decoder.config
        if offset is None:
            offset = int(config.max_position_embeddings) // 3
        require_integer("local", local, least=0)
        require_integer("offset", offset, least=local + 1)
        self.offset, self.local = offset, local
        self.kind = attention_name(self.causal_lm)
        if self.kind not in ("sdpa", "eager"):
            raise ValueError(f"string_positions runs with sdpa and eager attention, got {self.kind!r}.")
        keeps = keeps_from_attention(self.decoder)
        if keeps is not None:  # the block would have no effect
            raise ValueError(f"string_positions needs attention that takes keyword arguments, and {keeps}.")
        absolute = why_not_relative(self.decoder)
        if absolute is not None:  # weights close to 1 would pass `_require_keys_that_turn`
            raise ValueError(
                f"{type(self.decoder).__name__} has {absolute}: string_positions cannot turn its keys further."
            )
        self._require_inference()
        modules = [module for _, module in named_rotary_modules(self.decoder)]
        types = {kind for module in modules for kind in rope_types(module)}
        if len(modules) != 1 or isinstance(getattr(modules[0], "rope_type", None), dict):
            raise ValueError(
                f"{type(self.decoder).__name__} has several sets of RoPE parameters: string_positions needs one."
            )
        if any(map(depends_on_length, types)):
            raise ValueError(
                "string_positions needs frequencies that do not depend on length: not dynamic or longrope."
            )
        self.rotary: Any = modules[0]
        self.rotate = getattr(sys.modules[type(self.decoder).__module__], "apply_rotary_pos_emb", None)
        if self.rotate is None:
            raise ValueError(
                f"{type(self.decoder).__name__} rotates without an apply_rotary_pos_emb, which string_positions uses."
            )
        self.parameters = parameter_names(self.decoder)
        self._require_keys_that_turn()

    def _require_inference(self) -> None:
        if self.decoder.training:
            raise ValueError("string_positions is for inference: call model.eval() first.")
        if has_view(self.decoder, training=False):
            raise ValueError("string_positions and a view would both move positions: leave the view first.")

    @torch.no_grad()
    def _turn(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, sin) of S - W positions, [1, 1, rotated features], without YaRN's attention factor."""
        device = next(self.decoder.parameters()).device
        position = torch.tensor([[self.offset - self.local]], device=device)
        cos, sin = self.rotary(torch.zeros(1, 1, 1, device=device), position)
        length = (cos.square() + sin.square()).sqrt()  # the attention factor
        return cos / length, sin / length

    def turned(self, key: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Keys rotated by S - W more positions."""
        assert self.rotate is not None
        x = key if key.dtype == torch.float64 else key.float()  # to round once, not in each product
        cos, sin = (part.to(key.device) for part in turn)
        turned: torch.Tensor = self.rotate(x, x, cos, sin)[1]  # it rotates a query and a key
        return turned.to(key.dtype)

    @torch.no_grad()
    def _require_keys_that_turn(self) -> None:
        """Raise ValueError unless moving all positions by S - W changes all keys as `turned` does."""
        ids = torch.arange(4, device=next(self.decoder.parameters()).device)[None]
        modules = {id(module) for module in self.decoder.modules()}
        seen: list[list[torch.Tensor]] = []  # by shift, then by layer: [1, n_kv_heads, 4, head_dim]
        turn = self._turn()
        for shift in (0, self.offset - self.local):
            keys: list[torch.Tensor] = []

            def keep(call: AttentionCall, keys: list[torch.Tensor] = keys) -> None:
                if id(call.module) in modules:  # not another model, in another thread
                    keys.append(call.key)

            with watched_attention(self.causal_lm, keep):
                self.decoder(input_ids=ids, position_ids=ids + shift, use_cache=False)
            seen.append(keys)
        for before, after in zip(*seen, strict=True):
            try:
                error = (self.turned(before, turn) - after).abs().max()
            except RuntimeError:  # RoPE rotates other features than all of a key's
                error = after.new_full((), torch.inf)
            # 16 bits round in each layer; a wrong rotation is off by the size of the keys
            if not error <= 0.2 * after.abs().max():
                raise ValueError(
                    f"{type(self.decoder).__name__} has keys that RoPE does not rotate as a whole, e.g. in layers "
                    "without RoPE: string_positions cannot shorten their distances."
                )

    def plan(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Hook of the decoder: adds the plan to the arguments of the forward."""
        self._require_inference()
        call = {**dict(zip(self.parameters, args, strict=False)), **kwargs}
        tokens = call["input_ids"] if call.get("input_ids") is not None else call["inputs_embeds"]
        mask, cache = call.get("attention_mask"), cache_of(call)
        if mask is not None and (not isinstance(mask, torch.Tensor) or mask.ndim != 2):
            raise ValueError("string_positions needs an attention_mask [batch, tokens] or None.")
        cached = tokens_in(cache)
        rows, n = tokens.shape[:2]
        document = None
        if mask is not None and not mask.all():
            document = mask.long() - 1  # 0 on tokens, -1 on padding
        elif not cached and call.get("position_ids") is not None:  # rows may hold several documents
            document = locate_documents(rows, n, tokens.device, call["position_ids"], None).ordinal
        # `_turn` in each forward: the model may have been rescaled within the block
        return args, {**kwargs, PLAN: _Plan(cached, document, self._turn())}

    def attend(self, call: AttentionCall) -> torch.Tensor | None:
        """Attention [batch, n, n_heads, value_dim] of a layer; None if no two tokens are S or more apart."""
        plan: _Plan | None = call.options.pop(PLAN, None)
        if plan is None:
            return None
        n_queries, n_keys = call.query.shape[2], call.key.shape[2]
        window = sliding_window(call, self.decoder.config)
        if window is not None and window <= self.offset:
            return None
        if window is not None or n_keys != plan.cached + n_queries:
            raise ValueError(
                f"string_positions needs all keys so far and no sliding window above offset={self.offset}, got "
                f"{n_keys} keys for {plan.cached + n_queries} tokens and a window of {window}: use a DynamicCache."
            )
        if n_keys <= self.offset:
            return None
        far = self.turned(call.key[:, :, : n_keys - self.offset], plan.turn)  # [batch, n_kv_heads, n_keys - S, d]
        at_once = max(1, _MASK_ENTRIES // (n_keys * (1 if plan.document is None else len(call.query))))
        parts = []
        for begin in range(0, n_queries, at_once):
            end = min(begin + at_once, n_queries)
            parts.append(self._some_queries(call, plan, far, begin, end))
        return torch.cat(parts, 1)

    def _some_queries(self, call: AttentionCall, plan: _Plan, far: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        # indices of the first and the last query among all tokens, those in the cache included
        first, last, device = plan.cached + begin, plan.cached + end - 1, call.query.device
        # the last query sees keys below n_far rotated further; the first query sees keys from `near` on as they are
        n_far, near = max(0, last - self.offset + 1), max(0, first - self.offset + 1)
        index = torch.cat([torch.arange(n_far, device=device), torch.arange(near, last + 1, device=device)])
        is_far = torch.arange(len(index), device=device) < n_far
        query = torch.arange(first, last + 1, device=device)
        distance = query[:, None] - index  # [queries, far keys and then near keys]
        # each query sees a key once: rotated further, or not
        seen = ((distance >= 0) & ((distance >= self.offset) == is_far))[None]  # [1 or batch, queries, keys]
        if plan.document is not None:
            seen = seen & (plan.document[:, query, None] == plan.document[:, None, index])
            seen = seen & (plan.document[:, None, index] >= 0)
            seen = seen | ((distance == 0) & ~is_far)  # a softmax over nothing is NaN
        mask = seen[:, None]  # [1 or batch, 1, queries, keys]
        if self.kind == "eager":
            mask = additive_mask(mask, call.query.new_zeros(()))
        key = torch.cat([far[:, :, :n_far], call.key[:, :, near : last + 1]], 2)
        value = torch.cat([call.value[:, :, :n_far], call.value[:, :, near : last + 1]], 2)
        return call.with_inputs(call.query[:, :, begin:end], key, value, mask)
