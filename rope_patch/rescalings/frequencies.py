"""Frequencies as RoPE parameters: the plainest rope_type of Transformers that says them."""

import math
from typing import TYPE_CHECKING, Any

import torch

from ..base.validators import require_number
from ..rope.rotary import is_dynamic, is_longrope, with_factor

if TYPE_CHECKING:
    from .base import NativeRope, Rescaling

_STILL = 3e38
"""LongRoPE's divisor of a pair that does not turn. In float32 it is finite, and times B^(2j/d) infinite for all but the
first pairs, so that their frequency is 0; that of the first is 3e-39."""

_SAME = 1e-6  # relative; Transformers' own powers in float32 are as far from float64


def plain_frequencies(rope_theta: float, rotary_dim: int) -> torch.Tensor:
    """theta_j = B^(-2j/d), j = 0..d/2-1: [d/2] float64, radians per position."""
    return rope_theta ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64, device="cpu") / rotary_dim)


def trained_frequencies(inv_freq: torch.Tensor, rope_parameters: dict[str, Any]) -> torch.Tensor:
    """Float32 frequencies of a rotary module in float64, [d/2]; those that are B^(-2j/d) exactly so."""
    plain = plain_frequencies(rope_parameters["rope_theta"], 2 * inv_freq.numel())
    if inv_freq.is_meta:
        return plain if rope_parameters["rope_type"] == "default" else plain.to("meta")
    held = inv_freq.detach().cpu().double().flatten()
    return torch.where(torch.isclose(held, plain, rtol=10 * _SAME, atol=0.0), plain, held)


def chosen_frequencies(rescaling: "Rescaling", native: "NativeRope") -> tuple[torch.Tensor, float]:
    """What a rescaling makes of `native`: frequencies [d/2] float64, and what cos and sin are multiplied by.

    Raises:
        ValueError: the native frequencies follow the length of the text, or the new ones make no sense.
    """
    trained = native.rope_parameters
    two_sets = is_longrope(native.rope_type) and trained["long_factor"] != trained["short_factor"]
    if is_dynamic(native.rope_type) or two_sets:
        raise ValueError(
            f"rescaling {rescaling.name!r} starts from frequencies that are the same for texts of every length; those "
            f"of this model ({native.rope_type!r}) are not, and would be lost. Use 'abf', which keeps them."
        )
    if native.theta.is_meta:
        raise ValueError(
            f"rescaling {rescaling.name!r} starts from the model's frequencies, which are on the device meta: load the "
            "weights first."
        )
    with torch.device("cpu"):  # also for tensors that it makes
        theta = rescaling.frequencies(native.theta.clone(), native)
    what = f"rescaling {rescaling.name!r}: {type(rescaling).__name__}"
    expected = f"{what}.frequencies must return a tensor [{len(native.theta)}] of finite numbers of at least 0"
    if not isinstance(theta, torch.Tensor) or theta.shape != native.theta.shape:
        got = tuple(theta.shape) if isinstance(theta, torch.Tensor) else type(theta).__name__
        raise ValueError(f"{expected}, one for each pair of features, got {got}.")
    theta = theta.detach().cpu().double()
    wrong = ~(theta.float().isfinite() & (theta >= 0))
    if wrong.any():
        j = int(wrong.nonzero()[0])
        raise ValueError(f"{expected}, in radians per position, got {theta[j].item()} for pair {j}.")
    scaling = rescaling.attention_scaling(native)
    require_number(f"{what}.attention_scaling (what cos and sin are multiplied by)", scaling)
    return theta, float(scaling)


def rope_parameters_of(rescaling: "Rescaling", native: "NativeRope") -> dict[str, Any]:
    """The plainest RoPE parameters with the frequencies and the attention scaling that a rescaling chooses.

    Unchanged frequencies keep the native parameters. B'^(-2j/d) / f is rope_type "default" if f is 1 and "linear" if
    it is larger. Others are "longrope" with the same divisors B^(-2j/d) / theta'_j for short and long texts.
    """
    theta, scaling = chosen_frequencies(rescaling, native)
    if torch.equal(theta, native.theta) and scaling == native.attention_scaling:
        return with_factor(dict(native.rope_parameters), native.window)
    # of all types, only 'proportional' counts the pairs that stand still
    whole = {"partial_rotary_factor": 1.0} if native.rope_type == "proportional" else {}
    power_law = _power_law(theta, native) if scaling == 1 else None
    if power_law is not None:
        factor, rope_theta = power_law
        form = {"rope_type": "default"} if factor == 1 else {"rope_type": "linear", "factor": factor}
        return {**form, **whole, "rope_theta": rope_theta}
    d = native.rotary_dim
    divisors = (plain_frequencies(native.rope_theta, d) / theta).clamp(max=_STILL)
    window = rescaling.target_window(native.window) or native.window
    # programs multiply by sqrt(1 + ln(window / origin) / ln(origin)), whatever attention_factor says
    origin = window if scaling == 1 else native.window
    return {
        "rope_type": "longrope",
        "factor": max(1.0, window / origin),
        "long_factor": [_plain_number(divisor) for divisor in divisors.tolist()],
        "short_factor": [_plain_number(divisor) for divisor in divisors.tolist()],
        "original_max_position_embeddings": origin,
        "attention_factor": scaling,
        **whole,
    }


def _power_law(theta: torch.Tensor, native: "NativeRope") -> tuple[float, float] | None:
    """A factor f of at least 1 and a base B' with theta_j = B'^(-2j/d) / f; None if there are none."""
    d = native.rotary_dim
    if not (0 < theta[0] <= 1 + _SAME and theta[-1] > 0):
        return None
    factor = _plain_number(1 / theta[0].item())
    if math.isclose(factor, 1, rel_tol=_SAME):
        factor = 1.0
    bases = [native.rope_theta]
    if d > 2:
        bases.append(_plain_number((theta[0] / theta[-1]).item() ** (d / (d - 2))))
    fitting = (
        base
        for base in bases
        if base > 1 and torch.allclose(theta * factor, plain_frequencies(base, d), rtol=_SAME, atol=0.0)
    )
    base = next(fitting, None)
    return None if base is None else (factor, base)


def _plain_number(value: float) -> float:
    """`value` without the last digits of float64: 4.0 for 4.000000000000001."""
    return float(f"{value:.12g}")
