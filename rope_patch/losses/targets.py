"""Options of relation distillation: which relations, and their weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from ..base.validators import require_number

Denominator = Literal["own_heads", "query_heads"]
Rope = Literal["post", "pre"]
Divergence = Literal["kl", "mse"]


@dataclass(frozen=True, kw_only=True)
class RelationTargets:
    """The relations of LinearARD and its variants.

    loss = sum_X weight_X mean over layers, heads and tokens of D(R_teacher(i, :), R_student(i, :)), X in q, k, v and
    the attention map. All are causal within documents, as in the authors' code. A sliding window, a cap of scores and
    attention sinks of a layer are ignored.

    Args:
        q: weight of Q Q^T relations.
        k: weight of K K^T relations.
        v: weight of V V^T relations.
        attention: weight of the attention maps softmax(Q K^T); "ATTN+V" is q=0, k=0, v=1, attention=1.
        layers: indices of the layers that count; None means all.
        rope: "post" takes q and k as attention does, "pre" before RoPE is applied.
        denominator: divisor of the sums of k and v: the number of their "own_heads" (the paper), or of "query_heads"
            (the authors' code, which makes them smaller by n_kv_heads / n_heads).
        strip_attention_factor: whether to divide the student's q and k by YaRN's attention factor, which the
            teacher's do not have.
        divergence: "kl", or "mse", against which the paper argues without a run: sum_j (R_teacher - R_student)^2.

    Source: LinearARD, arXiv:2604.00004, section on objectives and its ablations.
    """

    q: float = 1.0
    k: float = 1.0
    v: float = 1.0
    attention: float = 0.0
    layers: tuple[int, ...] | None = None
    rope: Rope = "post"
    denominator: Denominator = "own_heads"
    strip_attention_factor: bool = False
    divergence: Divergence = "kl"

    def __post_init__(self) -> None:
        for name in ("q", "k", "v", "attention"):
            require_number(f"the weight of {name!r}", getattr(self, name), least=0)
        if not isinstance(self.strip_attention_factor, bool):
            raise ValueError(f"strip_attention_factor must be True or False, got {self.strip_attention_factor!r}.")
        if not self.weights:
            raise ValueError("all weights of q, k, v and attention are 0: there is nothing to distil.")
        for name, allowed in (("rope", Rope), ("denominator", Denominator), ("divergence", Divergence)):
            if getattr(self, name) not in get_args(allowed):
                raise ValueError(f"{name} must be one of {get_args(allowed)}, got {getattr(self, name)!r}.")
        if self.divergence == "mse" and self.attention:
            raise ValueError("divergence 'mse' is a control for q, k and v relations: set attention=0.")
        object.__setattr__(self, "layers", checked_layers(self.layers))

    @property
    def alike_from_the_start(self) -> bool:
        """Whether teacher and student have the same relations: those of the first layer before RoPE."""
        return self.layers == (0,) and not self.attention and (self.rope == "pre" or set(self.weights) == {"v"})

    @property
    def weights(self) -> dict[str, float]:
        """Target -> weight, for weights above 0."""
        return {name: float(getattr(self, name)) for name in ("q", "k", "v", "attention") if getattr(self, name)}


def checked_layers(layers: Sequence[int] | None) -> tuple[int, ...] | None:
    """Return layer indices as a tuple, or None.

    Raises:
        ValueError: they are not a sequence of one or more different integers of at least 0.
    """
    if layers is None:
        return None
    indices = isinstance(layers, Sequence) and all(type(i) is int and i >= 0 for i in layers)
    if not indices or not layers or len(set(layers)) < len(layers):
        raise ValueError(
            f"layers must be a list of one or more different layer indices from 0, e.g. [3], or None, got {layers!r}."
        )
    return tuple(layers)
