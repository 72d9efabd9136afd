"""How much memory a training step takes at its peak, by arithmetic."""

from dataclasses import dataclass, fields

from ..memory_plan import MASKS_TO
from .facts import ModelSize

_CHUNK = {"cuda": 5 * 2**28, "cpu": 2**26}  # bytes of logits that exist at a time, see rope_kernels.linear_ce_kl


@dataclass(frozen=True)
class Step:
    """What a training step is made of, as far as memory goes.

    Args:
        train: "all", "qkv" or "lora".
        lora_rank: of adapters.
        row_length: n, tokens of the longest row; one is read at a time, or shorter ones with as many tokens.
        autocast: whether products are in 16 bits.
        checkpointing: whether a layer's activations are computed again in backward.
        teacher: whether a native model is read besides.
        accumulates: whether gradients of several rows are added before a step.
        weight_bytes: of a value of the weights. `extend` trains 4; only weights under adapters are in 16 bits.
        device: "cuda" or "cpu".
        own_loss: whether the loss is that of objective "native-distill", with a teacher or without.
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

    @property
    def product_bytes(self) -> int:
        """Of a value that is multiplied."""
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
        """Of all parts."""
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
            adapters     4 c r
        kept = L times that; with checkpointing L w n H, the inputs of layers
        in flight = 2 c n I, gradients within the MLP; with checkpointing a layer's activations besides; with a sliding
            window s below n the blocks of b = max(s, 1024) queries, their outputs, the keys and values that they
            see, for each query head, and gradients of all, 4 c n Q (2 + s / b); where n < 16384 a mask of n x n in
            their place, in one byte and as numbers that are added to scores, (1 + c) n^2
        loss = n H (3 w + c) + 4 V H for the head's gradient + 1.1 of the logits that exist at a time

    What layers keep is what PyTorch saves for backward, which a test counts. Loss and layers are not in flight at the
    same time, so the larger of the two counts, but masks stay from forward to backward. Without accumulation gradients
    come as kept activations go, so the larger of those two counts. TRL's next-token loss has few logits at a time;
    "native-distill" those of `rope_kernels.linear_ce_kl`, and a tenth more as measured with a teacher.

    Args:
        size: of the model.
        step: what is done.
    """
    lora = step.train == "lora"
    trained = {"all": size.parameters, "qkv": size.qkv, "lora": step.lora_rank * size.lora_per_rank}[step.train]
    w = step.weight_bytes
    t = 4 if lora else w
    c = step.product_bytes
    n, hidden = step.row_length, size.hidden
    head = size.vocabulary * hidden
    of_layer = n * saved_of_layer(size, step)
    masks = (1 + c) * n * n if 0 < size.sliding_window < n < MASKS_TO else 0
    kept = masks + size.n_layers * (w * n * hidden if step.checkpointing else of_layer)
    in_flight = 2 * c * n * size.intermediate + (of_layer if step.checkpointing else 0)
    if 0 < size.sliding_window < n and n >= MASKS_TO:
        in_flight += int(4 * c * n * size.queries * (1 + size.keys_in_block))
    logits = 0
    if step.teacher or step.own_loss:
        logits = min(_CHUNK[step.device], (1 + step.teacher) * n * size.vocabulary * 4)
    loss = n * hidden * (3 * w + c) + (4 * head if step.train == "all" else 0) + logits * 11 // 10
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
    norms = size.norms * (4 + w * everything) * size.hidden + (4 + c * everything) * size.normed
    if everything:
        inputs = (5 if copies else 2) * c * size.hidden
    else:
        inputs = (3 if copies else 1) * c * size.hidden
    adapters = 0
    if step.train == "lora":
        adapters = 4 * c * step.lora_rank + (c * size.queries if copies else 0)
    attention = 2 * c * (size.queries + size.keys)
    return norms + inputs + adapters + attention + (3 + everything) * c * size.intermediate
