"""Estimate the time of a training from its operations and a short calibration of the machine."""

from dataclasses import dataclass

from rope_patch.export.reloading import TOKENS, has_room

from ..memory.size import ModelSize
from ..memory.step import MASKS_TO, Step

_SHARE = 0.62  # part of the speed of a large product that the operations of a step reach
_MASKED_SHARE = 0.4  # the same of attention with a mask, relative to other operations
_CALLS = 90  # kernels that the forward pass of a layer launches; its backward pass launches twice as many
# more for adapters on q, k, v and o of a layer; decoding its 4 bits adds nothing: two QLoRA steps of 8B shapes on an
# H200 took 8 % less than is counted without
_ADAPTER_CALLS = 70
_CHECKPOINT_CALLS = 200  # more for a checkpointed layer, whose hooks pack and unpack each saved tensor
_BLOCK_CALLS = 20  # more for each block of queries in a layer with a sliding window, trained without masks
# of two runs in 8B shapes on H200s, from files in memory (research/results/speed.md, "A whole `rope-patch extend`")
_START = 15.0  # seconds in which a process starts: 11 to 19
_LOADED = 3e9  # bytes of a checkpoint a second, until they are on the GPU
_SAVED = 1.4e9  # bytes a second of the checkpoints of a training, gathered from all GPUs and written
_BYTES = 0.67e9  # bytes of a checkpoint a second: loaded, merged, written, and loaded again
# operations a second of CPUs without room on a GPU, in bfloat16: with it an export of 16 GB beside 12 busy processes on
# 32 cores takes the 93 s that it took, of which 14 wrote layers
_HOST = 0.56e12


@dataclass(frozen=True)
class Rate:
    """How fast a machine is.

    Args:
        operations: floating-point operations a second, in a product of two large matrices.
        call: seconds that a small operation takes; many of them bound small models on a GPU.
    """

    operations: float
    call: float

    def seconds(self, operations: float, calls: float) -> float:
        """Seconds of computing plus launching: on an H200 neither hid the other."""
        return operations / (_SHARE * self.operations) + calls * self.call


H200_OPERATIONS = 470e12
"""Operations a second of the steps of docs/scaling.md on one NVIDIA H200, of which this is the mean."""
H200 = Rate(H200_OPERATIONS / _SHARE, 1.1e-5)
"""For a GPU that is not here."""


def step_operations(size: ModelSize, step: Step, length: int) -> float:
    """Floating-point operations of one row of n tokens, forward and backward.

    A product with P weights is 2 P n forward and 4 P n backward, of frozen weights 2 P n; a checkpointed layer has its
    forward again, and the teacher one more. Attention of n tokens is 4 Q n n / 2 forward, and 2.5 times that backward;
    in layers with a sliding window 4 Q n of the keys that a block of queries meets, or of n where n < 16384. These
    count 2.5 times, as a mask says there which tokens are seen. The head meets student and teacher once.

    Args:
        size: of the model.
        step: what is done.
        length: n.
    """
    forwards = 1 + step.checkpointing + step.teacher
    backward = 1 if step.train == "lora" else 2
    layers = 2 * size.in_layers * length * (forwards + backward)
    head = 2 * size.vocabulary * size.hidden * length * (2 + step.teacher + (step.train == "all"))
    attention = _attention(size, length, masked=length < MASKS_TO) * (forwards + 2.5)
    return float(layers + head + attention)


def forward_operations(size: ModelSize, length: int) -> float:
    """Floating-point operations of reading a row of n tokens without gradients and without logits of all tokens.

    Layers with a sliding window are read without masks there, see `rope_patch.attention.plain`.
    """
    return float(2 * size.in_layers * length + _attention(size, length, masked=False))


def _attention(size: ModelSize, length: int, *, masked: bool) -> float:
    """Operations of a forward pass; those with a mask count as many as take the same time without."""
    near: float = length / 2
    if _has_windows(size, length):
        near = (length if masked else min(size.block * size.keys_in_block, length)) / _MASKED_SHARE
    seen = size.n_full * length / 2 + (size.n_layers - size.n_full) * near
    return 4 * size.queries * length * seen


def _has_windows(size: ModelSize, length: int) -> bool:
    return 0 < size.sliding_window < length


def loading_seconds(checkpoint: int, n_gpus: int, times: int = 1) -> float:
    """Seconds of loading a checkpoint of so many bytes; several GPUs start a process each first."""
    return times * checkpoint / _LOADED + (_START if n_gpus > 1 else 0.0)


def saving_seconds(trained: int, gathered: int, n_saves: int) -> float:
    """Seconds of saving the checkpoints of a training, and then its result.

    Args:
        trained: bytes of trained weights and of optimizer states.
        gathered: bytes of all weights, where each GPU has only parts of them.
        n_saves: checkpoints.
    """
    return (n_saves * trained + (n_saves + 1) * gathered) / _SAVED


def export_seconds(size: ModelSize, checkpoint: int, device: str, rate: Rate, memory: int) -> float:
    """Seconds of merging, writing and checking a checkpoint, whose logits are computed before and after.

    Args:
        size: of the model.
        checkpoint: its bytes.
        device: that trains, "cuda" or "cpu".
        rate: of that device.
        memory: bytes that are free on it; where a GPU lacks room for two models, the host computes the logits.
    """
    operations = 4 * forward_operations(size, TOKENS)  # near and far, by the model and by the checkpoint
    on_host = device == "cuda" and not has_room(checkpoint, memory)
    return _START + checkpoint / _BYTES + (operations / _HOST if on_host else rate.seconds(operations, 0))


def step_calls(size: ModelSize, step: Step) -> float:
    """Kernels that one row launches."""
    forwards = 1 + step.checkpointing + step.teacher + 2  # a backward pass launches as many as two
    layer_operations = forwards * (_CALLS + (_ADAPTER_CALLS if step.train == "lora" else 0))
    blocks = 0.0
    if _has_windows(size, step.row_length) and step.row_length >= MASKS_TO:
        blocks = (size.n_layers - size.n_full) * forwards * _BLOCK_CALLS * step.row_length / size.block
    return float(size.n_layers * (layer_operations + (_CHECKPOINT_CALLS if step.checkpointing else 0)) + blocks)


def forward_calls(size: ModelSize) -> float:
    """Kernels that a forward pass launches."""
    return float(size.n_layers * _CALLS)
