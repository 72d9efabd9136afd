"""How long a training takes, by arithmetic and a short calibration of the machine."""

from dataclasses import dataclass

from .facts import ModelSize
from .memory import Step

_SHARE = 0.6  # of the rate of a large product that a training step reaches, where products are what takes time
_CALLS = 90  # operations that a layer's forward starts one by one; its backward starts twice as many
ROUGH = 2.0
"""Times by which minutes are off, either way, before the first steps are measured."""


@dataclass(frozen=True)
class Rate:
    """How fast a machine is.

    Args:
        operations: floating-point operations a second, of a product of two large matrices.
        call: seconds that one small operation takes, which bounds small models on a GPU.
    """

    operations: float
    call: float

    def seconds(self, operations: float, calls: float) -> float:
        """Of a training step: what it computes or what it starts, whichever takes longer."""
        return max(operations / (_SHARE * self.operations), calls * self.call)


def step_operations(size: ModelSize, step: Step, length: int) -> float:
    """Floating-point operations of one row of n tokens, forward and backward.

    A product with P weights is 2 P n forward and 4 P n backward, of frozen weights 2 P n; a checkpointed layer has its
    forward again, and the teacher one more. Attention of n tokens to m at most is 4 Q n m' forward, m' = n / 2 or the
    sliding window, and 2.5 times that backward. The head meets student and teacher once.

    Args:
        size: of the model.
        step: what is done.
        length: n.
    """
    forwards = 1 + step.checkpointing + step.teacher
    backward = 1 if step.train == "lora" else 2
    layers = 2 * size.in_layers * length * (forwards + backward)
    head = 2 * size.vocabulary * size.hidden * length * (2 + step.teacher + (step.train == "all"))
    attention = _attention(size, length) * (forwards + 2.5)
    return float(layers + head + attention)


def forward_operations(size: ModelSize, length: int) -> float:
    """Floating-point operations of reading a row of n tokens without gradients and without logits of all tokens."""
    return float(2 * size.in_layers * length + _attention(size, length))


def _attention(size: ModelSize, length: int) -> float:
    """Of a forward."""
    near = min(size.sliding_window, length / 2)
    seen = size.n_full * length / 2 + (size.n_layers - size.n_full) * near
    return 4 * size.queries * length * seen


def step_calls(size: ModelSize, step: Step) -> float:
    """Operations that one row starts one by one."""
    return forward_calls(size) * (1 + step.checkpointing + step.teacher + 2)


def forward_calls(size: ModelSize) -> float:
    """Operations that a forward starts one by one."""
    return float(size.n_layers * _CALLS)
