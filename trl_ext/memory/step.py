"""Estimate the peak memory of a training step."""

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from rope_patch.attention.windowed import BLOCK
from rope_patch.rope.rotary import find_decoder

MASKS_TO = 16384
"""Tokens of a row from which on attention makes no mask of n x n, also where all fits; one takes 768 MiB there.

Below, a mask mostly takes no longer than a call for each document or block: `benchmarks/row_masks.py`.
"""
CHUNK = {"cuda": 5 * 2**28, "cpu": 2**26}  # bytes of logits that exist at a time, see rope_kernels.linear_ce_kl
_HEAD_NORMS = ("q_norm", "k_norm", "query_norm", "key_norm", "q_layernorm", "k_layernorm")
_QKV = ("q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value", "Wqkv")


@dataclass(frozen=True)
class ModelSize:
    """Sizes of a model, for estimates of memory and time.

    Args:
        parameters: all, tied ones once.
        in_layers: of the decoder's layers.
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

    @property
    def block(self) -> int:
        """Queries that look through a window at once where no mask of n x n is made, see `rope_patch.attention`."""
        return max(self.sliding_window, BLOCK)

    @property
    def keys_in_block(self) -> float:
        """Keys that a block of queries meets, as multiples of these."""
        return 1 + self.sliding_window / self.block

    @classmethod
    def of(cls, model: PreTrainedModel) -> "ModelSize":
        """The sizes of a model, with or without weights."""
        decoder = find_decoder(model)
        config: Any = decoder.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        n_full = sum(kind != "sliding_attention" for kind in types)
        ends_of: Any = model
        # both [vocabulary, hidden]
        embedding, head = ends_of.get_input_embeddings().weight, ends_of.get_output_embeddings().weight
        tied = head is embedding or bool(getattr(model.config.get_text_config(), "tie_word_embeddings", False))
        ends = embedding.numel() + (0 if tied else head.numel())
        linears = list(attention_linears(decoder))
        in_layers = sum(p.numel() for p in decoder.parameters()) - embedding.numel()
        queries = config.num_attention_heads * head_dim
        keys = (getattr(config, "num_key_value_heads", None) or config.num_attention_heads) * head_dim
        norms = _norms(decoder)
        hidden_norms = sum(size == config.hidden_size for name, size in norms if name not in _HEAD_NORMS)
        has_head_norms = any(name in _HEAD_NORMS for name, _ in norms)
        return cls(
            parameters=in_layers + ends,
            in_layers=in_layers,
            qkv=sum(sum(p.numel() for p in linear.parameters()) for name, linear in linears if name in _QKV),
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
            vocabulary=_shape(head)[0],
        )


@dataclass(frozen=True)
class Step:
    """The properties of a training step that its memory depends on.

    Args:
        train: "all", "qkv" or "lora".
        lora_rank: of adapters.
        row_length: n, tokens of the longest row; one is read at a time, or shorter ones with as many tokens.
        autocast: whether products are in 16 bits.
        checkpointing: whether a layer's activations are computed again in backward.
        teacher: whether the pretrained model runs too.
        accumulates: whether gradients of several rows are added before a step.
        weight_bytes: of a value of the weights. `extend` trains 4; only weights under adapters are in 16 bits.
        device: "cuda" or "cpu".
        own_loss: whether the loss is not TRL's next-token loss, which has few logits at a time.
        adapts_mlp: whether there are adapters on MLPs too.
    """

    train: str
    lora_rank: int
    row_length: int
    autocast: bool
    checkpointing: bool
    teacher: bool
    accumulates: bool = True
    weight_bytes: int = 4
    device: str = "cuda"
    own_loss: bool = False
    adapts_mlp: bool = False

    @property
    def product_bytes(self) -> int:
        """Bytes of a value in matrix products."""
        return 2 if self.autocast else self.weight_bytes


@dataclass(frozen=True)
class Memory:
    """Bytes at the peak of a step, by part.

    Args:
        weights: the model's, and adapters.
        gradients: of what is trained.
        optimizer: AdamW's two averages.
        teacher: a frozen copy of the weights; 0 under adapters, where the same weights are the teacher.
        casts: 16-bit copies of float32 weights that autocast keeps through a forward.
        activations: what backward needs of all layers, and of the one that it is in.
        loss: chunks of logits, the gradient of the head, hidden states of student and teacher.
    """

    weights: int
    gradients: int
    optimizer: int
    teacher: int
    casts: int
    activations: int
    loss: int

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(getattr(self, part.name) for part in fields(self))


def peak_memory(size: ModelSize, step: Step) -> Memory:
    """Bytes at the peak of a step of one row at a time, or of shorter ones with as many tokens.

    With P parameters, T trained ones, n tokens, L layers, H features, I in an MLP, Q and K of queries and keys, V
    entries of the vocabulary, r ranks; w bytes of a weight and of a hidden state, t of a trained value (4 of adapters,
    else w), and c of what is multiplied (2 under autocast, else w):

        weights = w P, and t T of adapters; gradients = t T; optimizer = 2 t T; teacher = w P without adapters
        casts = c times the weights of layers and head, where c < w
        of a layer = n times the sum of
            norms        4 H each in float32, and w H more where its weight is trained; so those of queries and keys
            inputs       of products with trained weights, c H each: of q, k, v, gate and up where autocast copies
                         each, else of two; of adapters (or q, k, v) 3 where autocast copies, else 1; of o's Q besides
            attention    2 c (Q + K): q, k, v and the output
            MLP          3 c I: gate, its activation, up; c I more, down's input, where down is trained
            adapters     4 c r; with those on the MLP 7 c r, c I as where down is trained, and inputs of gate and up
        kept = L times that; with checkpointing L w n H, the inputs of layers
        in flight = n (2 c I + (4 + w) H), gradients within the MLP, that of the residual stream, and a norm in float32;
            with checkpointing a layer's activations besides; with a sliding window s below n the blocks of b = max(s,
            1024) queries, their outputs, the keys and values that they see, for each query head, and gradients of all,
            4 c n Q (2 + s / b); where n < 16384 a mask of n x n in their place, in one byte and as numbers that are
            added to scores, (1 + c) n^2
        loss = n H (3 w + c) + 4 V H for the head's gradient + 1.1 of the logits that exist at a time

    What layers keep is what PyTorch saves for backward, which a test counts. Loss and layers are not in flight at the
    same time, so the larger of the two counts, but masks stay from forward to backward. Without accumulation gradients
    come as kept activations go, so the larger of those two counts. TRL's next-token loss has few logits at a time;
    "native-distill" those of `rope_kernels.linear_ce_kl`, and a tenth more as measured with a teacher.
    """
    lora = step.train == "lora"
    trained = {"all": size.parameters, "qkv": size.qkv, "lora": step.lora_rank * size.lora_per_rank}[step.train]
    w = step.weight_bytes
    t = 4 if lora else w
    c = step.product_bytes
    n, hidden = step.row_length, size.hidden
    head = size.vocabulary * hidden
    windowed = 0 < size.sliding_window < n
    masks = (1 + c) * n * n if windowed and n < MASKS_TO else 0
    kept = masks + size.n_layers * n * (w * hidden if step.checkpointing else saved_of_layer(size, step))
    in_flight = n * in_flight_of_layer(size, step, blocks=windowed and not masks)
    loss = bytes_of_loss(size, step, n, head if step.train == "all" else 0)
    gradients = t * trained
    return Memory(
        weights=w * size.parameters + (t * trained if lora else 0),
        gradients=gradients,
        optimizer=2 * t * trained,
        teacher=0 if lora or not step.teacher else w * size.parameters,
        casts=c * (size.in_layers + head) if c < w else 0,
        activations=(kept if step.accumulates else max(kept - gradients, 0)) + max(in_flight - loss, 0),
        loss=loss,
    )


def saved_of_layer(size: ModelSize, step: Step) -> int:
    """Bytes a token that a layer keeps for its backward, as `peak_memory` sums them."""
    w, c = step.weight_bytes, step.product_bytes
    copies = c < w or (step.autocast and step.train == "lora")  # adapters take their input in float32
    everything = step.train == "all"
    mlp = everything or step.adapts_mlp
    norms = size.norms * (4 + w * everything) * size.hidden + (4 + c * everything) * size.normed
    if mlp:
        inputs = (5 if copies else 2) * c * size.hidden
    else:
        inputs = (3 if copies else 1) * c * size.hidden
    adapters = 0
    if step.train == "lora":
        adapters = (4 + 3 * mlp) * c * step.lora_rank + (c * size.queries if copies else 0)
    attention = 2 * c * (size.queries + size.keys)
    return norms + inputs + adapters + attention + (3 + mlp) * c * size.intermediate


def in_flight_of_layer(size: ModelSize, step: Step, *, blocks: bool) -> int:
    """Bytes a token that the backward of a layer holds besides what layers keep, as `peak_memory` sums them.

    With `blocks`, layers with a sliding window go by blocks of queries in place of masks.
    """
    c = step.product_bytes
    in_flight = 2 * c * size.intermediate + (4 + step.weight_bytes) * size.hidden
    in_flight += saved_of_layer(size, step) if step.checkpointing else 0
    return in_flight + (int(4 * c * size.queries * (1 + size.keys_in_block)) if blocks else 0)


def bytes_of_loss(size: ModelSize, step: Step, tokens: int, trained_head: int, states: float = 2.0) -> int:
    """Bytes that exist while the loss is formed, as `peak_memory` sums them.

    Args:
        size: of the model.
        step: what is done.
        tokens: that are read at once.
        trained_head: parameters of the head that have a gradient.
        states: tensors [tokens, hidden] that the loss compares, and their gradients.
    """
    hidden = tokens * int(size.hidden * ((1 + states) * step.weight_bytes + step.product_bytes))
    logits = 0
    if step.teacher or step.own_loss:
        logits = min(CHUNK[step.device], (1 + step.teacher) * tokens * size.vocabulary * 4)
    return hidden + 4 * trained_head + logits * 11 // 10


def attention_linears(decoder: nn.Module) -> list[tuple[str, Any]]:
    """(name within its layer's attention, module) of every linear module of attention."""
    return [
        (name, module)
        for parent in decoder.modules()
        if getattr(parent, "layer_idx", None) is not None and "Attention" in type(parent).__name__
        for name, module in parent.named_children()
        if isinstance(module, nn.Linear)
    ]


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
