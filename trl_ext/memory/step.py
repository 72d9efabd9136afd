"""Estimate the peak memory of a training step."""

import math
from dataclasses import dataclass, replace
from typing import Literal

from ..engines.sharding import Sharding
from ..objectives.base import ActivationFactors
from .size import ModelSize
from .tiled import TILE

MASKS_TO = 16384
"""Tokens of a row from which on attention makes no mask of n x n, also where all fits; one takes 768 MiB there.

Below, a mask mostly takes no longer than a call for each document or block: `benchmarks/row_masks.py`.
"""
CHUNK = {"cuda": 5 * 2**28, "cpu": 2**26}  # bytes of logits that exist at a time, see rope_kernels.linear_ce_kl


@dataclass(frozen=True)
class Step:
    """The properties of a training step that its memory depends on.

    Args:
        train: "all", "qkv" or "lora".
        lora_rank: of adapters.
        row_length: tokens of the longest row, before ranks share it; shorter ones come with as many tokens.
        autocast: whether products are in 16 bits.
        checkpointing: whether a layer's activations are computed again in backward.
        teacher: whether the pretrained model runs too.
        rows: that are read at once.
        accumulates: whether gradients of several batches are added before a step.
        weight_bytes: of a value of the weights and of hidden states. `extend` trains 4; only weights under adapters
            are in 16 bits.
        trained: parameters that are trained; None counts them by `train`, of adapters those on attention alone.
        trained_bytes: of one of them, on average; None is 4 of adapters, else `weight_bytes`.
        optimizer: name of it, a value of `optim`.
        device: "cuda" or "cpu".
        own_loss: whether the loss is not TRL's next-token loss, which has few logits at a time.
        adapts_mlp: whether there are adapters on MLPs too.
        trains_head: whether the output head is trained; None where all weights are.
        teacher_on_host: whether the copy that teaches waits on the host.
        attention: "blocks" makes no masks and looks through sliding windows by blocks of queries, "masks" makes masks
            of n x n, "kernel" needs neither. None is "blocks" from `MASKS_TO` tokens on, and "masks" below.
        masks_all: whether all rows have such a mask, as padded rows and those of several documents do, and not those
            of layers with sliding windows alone.
        long: whether layers run in tiles of tokens.
        offloaded_layers: layers whose checkpointed inputs wait on the host.
        in_4_bits: whether layers are to be quantised, of a model whose sizes are those before.
        factors: of the objective.
    """

    train: str
    lora_rank: int
    row_length: int
    autocast: bool
    checkpointing: bool
    teacher: bool
    rows: int = 1
    accumulates: bool = True
    weight_bytes: int = 4
    trained: int | None = None
    trained_bytes: float | None = None
    optimizer: str = "adamw_torch"
    device: str = "cuda"
    own_loss: bool = False
    adapts_mlp: bool = False
    trains_head: bool | None = None
    teacher_on_host: bool = False
    attention: Literal["blocks", "masks", "kernel"] | None = None
    masks_all: bool = False
    long: bool = False
    offloaded_layers: int = 0
    in_4_bits: bool = False
    factors: ActivationFactors = ActivationFactors()

    @property
    def product_bytes(self) -> int:
        """Bytes of a value in matrix products."""
        return 2 if self.autocast else self.weight_bytes


@dataclass(frozen=True)
class Memory:
    """Bytes on a device at the peak of a step, by part, of one rank: `peak_memory` has the formula of each."""

    weights: int
    gradients: int
    optimizer: int
    teacher: int
    casts: int
    checkpoints: int
    freed: int
    masks: int
    beside: int
    layer: int
    loss: int

    @property
    def fixed(self) -> int:
        """Bytes that do not grow with rows."""
        return self.weights + self.gradients + self.optimizer + self.teacher + self.casts

    @property
    def at_once(self) -> int:
        """Bytes besides `fixed` and what layers keep."""
        return self.masks + self.beside + max(self.layer, self.loss)

    @property
    def total(self) -> int:
        """Bytes at the peak: loss and layers follow one another."""
        return self.fixed + self.checkpoints - self.freed + self.at_once

    @property
    def parts(self) -> dict[str, int]:
        """Part in words -> bytes, which add up to `total`, without those of none."""
        parts = {
            "weights": self.weights,
            "gradients": self.gradients,
            "optimizer states": self.optimizer,
            "teacher, a copy of the original model": self.teacher,
            "weights in 16 bits": self.casts,
            "kept by layers": self.checkpoints - self.freed,
            "masks": self.masks,
            "kept by the objective": self.beside,
            "one layer, or the loss": max(self.layer, self.loss),
        }
        return {name: size for name, size in parts.items() if size}


def peak_memory(size: ModelSize, step: Step, sharding: Sharding | None = None) -> Memory:
    """Bytes at the peak of a step, by arithmetic alone: `extend` asks for many.

    With P parameters, T trained ones, L layers, H features, I within an MLP, Q and K of queries and keys, V entries of
    the vocabulary, r ranks of adapters; B rows of n tokens; w bytes of a weight and of a hidden state, t of a trained
    value, c of what is multiplied (2 under autocast, else w); `factors` g, p, s, b, k (1, 1, 2, 0, 0 of next tokens):

        total       = fixed + checkpoints - freed + masks + beside + max(layer, loss): loss and layers take turns
        fixed       = weights + gradients + optimizer + teacher + casts
          weights     w P, and t T of adapters; quantised ones as they are
          gradients   t T
          optimizer   2 t T of AdamW; 2 T in 8 bits, 8 T of bitsandbytes in 32 bits; 0 of paged ones, SGD, Adafactor
          teacher     w P, if it is a copy on the device
          casts       c of each weight of layers, head and adapters that has more: copies that autocast keeps
        checkpoints = g B n (L kept + w H); with checkpointing g B n (L + 1) w H, inputs of layers and of the last norm
        kept        = for each token of a layer the sum of
          norms       4 H each in float32, and w H more where its weight is trained; so those of queries and keys
          inputs      of products with trained weights, c H each: of q, k, v, gate and up where autocast copies each,
                      else of two; of adapters (or q, k, v) 3 where autocast copies, else 1, as over 4 bits; of o's
                      Q besides, where it copies
          attention   2 c (Q + K): q, k, v and the output
          MLP         3 c I: gate, its activation, up; c I more, down's input, where down is trained
          adapters    4 c r; with those on the MLP 7 c r, c I as where down is trained, and inputs of gate and up
        freed       = gradients, at most checkpoints; 0 where gradients of several batches are added, or with `long`
        masks       = (1 + c) B n^2, in one byte and as numbers that are added to scores, from forward to backward
        beside      = b B n w H, tensors that the objective keeps while layers run; with checkpointing k B n more
        layer       = p B n max(attention, mlp + blocks); in tiles the second of one tile; and c for each weight of
                      the largest quantised matrix, which is decoded for its product
          attention   c (4 H + 6 Q + 2 K) + 4 Q: residual stream and its gradient, the norm's output, queries, keys,
                      values, the output, and gradients of all, those of keys and values once for each query head, and
                      float32 sums of queries' gradients; in a ring 8 Q + 16 K more, sums of its parts
          mlp         2 c I + (4 + w) H: gradients within the MLP, that of the residual stream, and a norm in float32;
                      with checkpointing kept too, less 4 H where w = 4: the first norm's input is the checkpoint
          blocks      4 c Q (2 + S / b), in place of masks where layers have a window S < n: blocks of b = max(S, 1024)
                      queries, their outputs, the keys and values that they see, for each query head, and gradients
        loss        = B n H ((1 + s) w + c) + 4 V H, the gradient of a trained head, + 1.1 of the logits that exist at a
                      time: few in TRL's loss, else those of `rope_kernels.linear_ce_kl`, and a tenth as measured

    The input of an offloaded layer leaves `checkpoints`, and one is back in `layer`. An engine divides what it splits
    by its ranks. In place of casts it has two layers and all outside of layers whole at a time (or `Sharding.live`
    weights), in c bytes, and buffers; it computes layers in c for w, and trains float32 values under autocast. What
    layers keep is what PyTorch saves for backward, which a test counts; others hold the sum to steps on H200s.

    Args:
        size: of the model.
        step: what is done.
        sharding: what an engine splits over ranks; None for nothing.
    """
    sharding, size = sharding or Sharding(), size.in_4_bits if step.in_4_bits else size
    w, c, hidden, adapted = step.weight_bytes, step.product_bytes, size.hidden, step.train == "lora"
    trained = step.trained
    if trained is None:
        trained = {"all": size.parameters, "qkv": size.qkv, "lora": step.lora_rank * size.lora_per_rank}[step.train]
    t = step.trained_bytes or (4 if adapted else w)
    if step.autocast and sharding.optimizer > 1:  # engines train float32 values
        t = max(t, 4)
    adapters = trained if adapted else 0
    weights = int(w * (size.parameters + adapters - trained) + t * trained)  # frozen ones and trained ones
    gradients = sharding.keeps_states * int(t * trained) // sharding.gradients
    head, in_layers = size.vocabulary * hidden, size.in_layers + adapters
    live = size.parameters - size.in_layers + 2 * in_layers // size.n_layers  # embeddings, head and two layers
    whole = c * (live if sharding.live is None else min(sharding.live, size.parameters + adapters))
    held = size.codes + sharding.buffers + whole * (sharding.weights > 1)  # bytes that each rank has whole
    has_copy = step.teacher and not (adapted or step.teacher_on_host)
    # none without autocast, where c = w
    casts = c * (size.in_layers + head) * (c < w) + c * adapters * (c < t)

    n = math.ceil(step.row_length / sharding.row)
    tokens, at_once = step.rows * n, step.factors.at_once * step.rows * n
    state = int(step.factors.graphs * tokens * w * hidden)  # one hidden state of all tokens
    kept = state if step.checkpointing else int(step.factors.graphs * tokens * saved_of_layer(size, step))
    checkpoints = (size.n_layers - step.offloaded_layers) * kept + state

    windowed = 0 < size.sliding_window < n
    way = step.attention or ("blocks" if n >= MASKS_TO else "masks")
    tile = min(at_once, TILE) if step.long and sharding.runs_in_tiles else at_once
    mlp = _mlp_in_flight(size, replace(step, weight_bytes=c) if sharding.weights > 1 else step)
    blocks = 4 * c * size.queries * (1 + size.keys_in_block) if windowed and way == "blocks" else 0
    attention = c * (4 * hidden + 6 * size.queries + 2 * size.keys) + 4 * size.queries
    attention += sharding.ring * (8 * size.queries + 16 * size.keys)
    layer = max(at_once * attention, tile * (mlp + blocks))
    trains_head = step.train == "all" if step.trains_head is None else step.trains_head
    return Memory(
        weights=sharding.keeps_weights * weights // sharding.weights + held,
        gradients=gradients,
        optimizer=sharding.keeps_states * int(_state_bytes(step.optimizer, t) * trained) // sharding.optimizer,
        teacher=has_copy * (weights // sharding.teacher + whole * (sharding.teacher > 1)),
        casts=casts * (sharding.weights == 1),
        checkpoints=checkpoints,
        # DeepSpeed's buffers are of gradients
        freed=0 if step.accumulates or step.long or sharding.buffers else min(checkpoints, gradients),
        masks=(1 + c) * step.rows * n**2 if way == "masks" and (windowed or step.masks_all) else 0,
        beside=int(step.factors.beside * tokens * w * hidden) + step.checkpointing * step.factors.kept * tokens,
        layer=int(layer) + c * size.decoded + (state if step.offloaded_layers else 0),
        loss=_loss(size, step, tokens) + 4 * head * trains_head,
    )


def _state_bytes(optimizer: str, trained_bytes: float) -> float:
    """Bytes of an optimizer's two states on the device for a trained value."""
    if optimizer.startswith("paged") or optimizer in ("sgd", "adafactor"):
        return 0
    if "8bit" in optimizer:
        return 2
    return 8 if "bnb" in optimizer else 2 * trained_bytes  # bitsandbytes has float32 states for weights of any dtype


def saved_of_layer(size: ModelSize, step: Step) -> int:
    """Bytes a token that a layer keeps for its backward: "kept" of `peak_memory`."""
    w, c, everything, adapted = step.weight_bytes, step.product_bytes, step.train == "all", step.train == "lora"
    copies = c < w or (step.autocast and adapted and not size.decoded)  # PEFT's LoRA casts its input, not over 4 bits
    mlp = everything or step.adapts_mlp
    norms = size.norms * (4 + w * everything) * size.hidden + (4 + c * everything) * size.normed
    inputs = c * size.hidden * ((5 if copies else 2) if mlp else (3 if copies else 1))
    adapters = adapted * c * ((4 + 3 * mlp) * step.lora_rank + copies * size.queries)
    return norms + inputs + adapters + 2 * c * (size.queries + size.keys) + (3 + mlp) * c * size.intermediate


def _mlp_in_flight(size: ModelSize, step: Step) -> int:
    """Bytes a token while a layer runs backward through its MLP: "mlp" of `peak_memory`."""
    w = step.weight_bytes
    kept = step.checkpointing * (saved_of_layer(size, step) - 4 * size.hidden * (w == 4))
    return 2 * step.product_bytes * size.intermediate + (4 + w) * size.hidden + kept


def _loss(size: ModelSize, step: Step, tokens: int) -> int:
    """Bytes of hidden states and logits while the loss is formed."""
    hidden = tokens * int(size.hidden * ((1 + step.factors.states) * step.weight_bytes + step.product_bytes))
    logits = 0
    if step.teacher or step.own_loss:
        logits = min(CHUNK[step.device], (1 + step.teacher) * tokens * size.vocabulary * 4)
    return hidden + logits * 11 // 10
