"""Figures that compare two models: the baseline, and what adaptation cost within the window."""

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from .loss_by_position import LossByPosition

T = TypeVar("T")


def baseline_label(labels: Iterable[str]) -> str:
    """The baseline, with which the other models are compared: "native" if it is there, or else the first label."""
    named = list(labels)
    return "native" if "native" in named else named[0]


def baseline_first(by_label: Mapping[str, T]) -> dict[str, T]:
    """`by_label` with the baseline in front."""
    if not by_label:
        return {}
    first = baseline_label(by_label)
    return {first: by_label[first], **by_label}


def runs_of_methods(labels: Iterable[str]) -> dict[str, list[str]]:
    """Method -> labels of its trained models: "ours#1" and "ours#2" are two of "ours"."""
    runs: dict[str, list[str]] = {}
    for label in labels:
        runs.setdefault(re.sub(r"#\d+$", "", label), []).append(label)
    return runs


def in_distribution_penalty(curve: "LossByPosition", baseline: "LossByPosition", window: int | None = None) -> float:
    """Relative rise of the loss over target positions 64..window against `baseline`, in percent.

    Args:
        curve: result of the adapted model.
        baseline: result of the baseline on the same rows. For a fine-tuned model that is a control trained on the same
            tokens without the method, since any training on the text lowers the loss.
        window: trained window; None means the baseline's.

    Raises:
        ValueError: the two were measured on rows of different length or number.

    Source: PosAug, FoGen 2026, its in-distribution penalty.
    """
    if (curve.seq_len, curve.n_rows) != (baseline.seq_len, baseline.n_rows):
        raise ValueError(
            f"both must be measured on the same rows, got {curve.n_rows} of {curve.seq_len} tokens and "
            f"{baseline.n_rows} of {baseline.seq_len}."
        )
    window = baseline.window if window is None else window
    return 100 * (curve.in_window(window) / baseline.in_window(window) - 1)


def recovery_ratio(scores: Mapping[str, float], native: Mapping[str, float]) -> float:
    """100 mean(scores) / mean(native), in percent, over benchmarks.

    Raises:
        ValueError: the two name different benchmarks.

    Source: LinearARD, arXiv:2604.00004, recovery ratio.
    """
    if set(scores) != set(native) or not native:
        raise ValueError(
            f"both must name the same benchmarks, got {', '.join(sorted(scores)) or 'none'} and "
            f"{', '.join(sorted(native)) or 'none'}."
        )
    return 100 * sum(scores.values()) / sum(native.values())
