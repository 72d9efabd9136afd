"""Checkpoints whose rotation 'drop-rope' took away."""

from .base import NativeRope, Rescaling

DROP_FACTOR = 1e9
"""Divisor of all frequencies: at position 131072 the fastest has turned by 1.3e-4 radians."""


def require_rotation(owner: Rescaling, native: NativeRope) -> None:
    """Raise ValueError for a checkpoint that was saved under 'drop-rope': a new base would have no effect."""
    parameters = native.rope_parameters
    if native.rope_type == "llama3" and parameters.get("factor") == DROP_FACTOR:
        raise ValueError(
            f"rescaling {owner.name!r} would change nothing: this checkpoint was saved under 'drop-rope', which leaves "
            "no rotation to scale. Use the model that it was made from, or 'drop-rope' with max_position_embeddings to "
            "name another window."
        )
