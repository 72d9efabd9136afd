"""The sizes of a model, from which memory and time are estimated."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from rope_patch.attention.windowed import BLOCK
from rope_patch.losses.teacher import adapter_layers
from rope_patch.rope.rotary import find_causal_lm, find_decoder

_HEAD_NORMS = ("q_norm", "k_norm", "query_norm", "key_norm", "q_layernorm", "k_layernorm")
QKV = ("q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value", "Wqkv", "c_attn")
"""Of Llama and most others, then of Phi-3, GPT-NeoX and DBRX; c_attn is Qwen's first, with code of its own."""


@dataclass(frozen=True)
class ModelSize:
    """Sizes of a model without its adapters.

    Args:
        parameters: all, tied ones once, without quantised ones.
        in_layers: of the decoder, without embeddings.
        qkv: of the projections to queries, keys and values.
        lora_per_rank: parameters that each rank of adapters on the attention projections adds.
        n_layers: layers.
        n_full: layers that attend to a whole text.
        sliding_window: tokens that the other layers attend to; 0 where there are none.
        hidden: features of a token.
        norms: norms of these features in a layer.
        normed: features of queries and keys together that have norms of their own, 0 in most families.
        intermediate: features within an MLP.
        queries: Q, features of all query heads together.
        keys: K, features of all key heads together.
        vocabulary: entries of the output head.
        codes: bytes of quantised weights with their scales, and of buffers.
        linears: in the linear modules of layers, which `load_in_4bit` quantises.
        decoded: of the largest quantised matrix, as large as which a product makes a copy.
    """

    parameters: int
    in_layers: int
    qkv: int
    lora_per_rank: int
    n_layers: int
    n_full: int
    sliding_window: int
    hidden: int
    norms: int
    normed: int
    intermediate: int
    queries: int
    keys: int
    vocabulary: int
    codes: int = 0
    linears: int = 0
    decoded: int = 0

    @property
    def in_4_bits(self) -> "ModelSize":
        """The model under `load_in_4bit` and `use_bnb_nested_quant`.

        Half a byte a weight, a byte for the scale of 64, and four for that of 256 such scales.
        """
        rest = {name: getattr(self, name) - self.linears for name in ("parameters", "in_layers")}
        codes = self.linears // 2 + self.linears // 64 + self.linears // 4096
        return replace(self, **rest, codes=self.codes + codes, linears=0, decoded=self.hidden * self.intermediate)

    @property
    def block(self) -> int:
        """Queries that look through a window at once where no mask of n x n is made, see `rope_patch.attention`."""
        return max(self.sliding_window, BLOCK)

    @property
    def keys_in_block(self) -> float:
        """Keys that a block of queries meets, as multiples of these."""
        return 1 + self.sliding_window / self.block

    @classmethod
    def of(cls, model: nn.Module) -> "ModelSize":
        """The sizes of a model, bare or wrapped, with or without weights, also where ZeRO-3 has split them."""
        ends_of: Any = find_causal_lm(model)
        decoder = find_decoder(model)
        config: Any = decoder.config
        adapted = bool(adapter_layers(model))

        def count(parameters: Iterable[torch.Tensor]) -> int:
            return sum(numel(p) for p in parameters if not (_is_code(p) or (adapted and p.requires_grad)))

        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        n_full = sum(kind != "sliding_attention" for kind in types)  # linear and chunked attention too
        linears = attention_linears(decoder)
        queries = config.num_attention_heads * head_dim
        keys = (getattr(config, "num_key_value_heads", None) or config.num_attention_heads) * head_dim  # GQA
        norms = _norms(decoder)
        hidden_norms = sum(size == config.hidden_size for name, size in norms if name not in _HEAD_NORMS)
        has_head_norms = any(name in _HEAD_NORMS for name, _ in norms)
        modules = [m for m in decoder.modules() if isinstance(m, nn.Linear)]
        coded = [m.in_features * m.out_features for m in modules if _is_code(m.weight)]
        codes = (*filter(_is_code, model.parameters()), *model.buffers())
        return cls(
            parameters=count(model.parameters()),
            in_layers=count(decoder.parameters()) - numel(ends_of.get_input_embeddings().weight),
            qkv=sum(count(linear.parameters()) for name, linear in linears if name in QKV),
            # A is [r, in_features], B is [out_features, r]
            lora_per_rank=sum(linear.in_features + linear.out_features for _, linear in linears),
            n_layers=config.num_hidden_layers,
            n_full=n_full,
            sliding_window=(getattr(config, "sliding_window", None) or 0) if n_full < len(types) else 0,
            hidden=config.hidden_size,
            norms=hidden_norms // config.num_hidden_layers,  # the last one stands behind the layers
            normed=queries + keys if has_head_norms else 0,
            intermediate=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
            queries=queries,
            keys=keys,
            vocabulary=_shape(ends_of.get_output_embeddings().weight)[0],
            codes=sum(numel(tensor) * tensor.element_size() + _scales(tensor) for tensor in codes),
            linears=count(m.weight for m in modules),
            decoded=max(coded, default=0),
        )


def attention_linears(decoder: nn.Module) -> list[tuple[str, Any]]:
    """(name within its layer's attention, module) of every linear module of attention, with or without adapters."""
    return [
        (name, module)
        for parent in decoder.modules()
        if getattr(parent, "layer_idx", None) is not None and "Attention" in type(parent).__name__
        for name, module in parent.named_children()
        if isinstance(getattr(module, "base_layer", module), nn.Linear)
    ]


def numel(tensor: torch.Tensor) -> int:
    """Numbers of a tensor; ZeRO-3 leaves none in a parameter that it has split."""
    numbers: int = getattr(tensor, "ds_numel", tensor.numel())
    return numbers


def _is_code(parameter: torch.Tensor) -> bool:
    """Whether a parameter is quantised: to integers, some of which hold two values of 4 bits, or to FP8."""
    return not parameter.is_floating_point() or parameter.element_size() == 1


def _scales(code: Any) -> int:
    """Bytes of the scales of a 4-bit weight of bitsandbytes, and of the scales of those."""
    state = getattr(code, "quant_state", None)
    states = [held for held in (state, getattr(state, "state2", None)) if held is not None]
    return sum(int(held.absmax.numel() * held.absmax.element_size()) for held in states)


def _norms(decoder: nn.Module) -> list[tuple[str, int]]:
    """(name within its layer, features) of every norm with a weight."""
    shapes = (
        (name.rpartition(".")[2], _shape(weight))
        for name, module in decoder.named_modules()
        if isinstance(weight := getattr(module, "weight", None), torch.Tensor)
    )
    return [(name, shape[0]) for name, shape in shapes if len(shape) == 1]


def _shape(tensor: torch.Tensor) -> torch.Size:
    """Of the whole tensor, where ZeRO-3 has split it and left none of it in the parameter."""
    shape: torch.Size = getattr(tensor, "ds_shape", tensor.shape)
    return shape
