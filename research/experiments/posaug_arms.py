"""The arms of research/experiments/posaug_from_scratch.py: views of rows, and what is done to arms that are finished."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Arm:
    """What is trained, or read.

    Args:
        view: of the rows of training.
        options: of the view.
        steps: as multiples of those that training from scratch takes; 0 trains nothing.
        after: arm whose finished weights it starts from; None for weights that are drawn.
        yarn: read under YaRN, which stretches the window to the length that is read.
    """

    view: str = "standard"
    options: Mapping[str, Any] = field(default_factory=dict)
    steps: float = 1.0
    after: str | None = None
    yarn: bool = False


def arms(window: int, retrofit: float = 0.1) -> dict[str, Arm]:
    """Every arm by name, those that start from another one behind it.

    Args:
        window: tokens that are trained on at once.
        retrofit: steps that a finished baseline is trained on for, as a share of its own.
    """
    posaug: dict[str, Any] = {"view": "posaug"}
    far = 7 * window
    of_rows = {"granularity": "sample"}
    scratch = {
        "baseline": Arm(),
        "uniform": Arm("posaug"),
        "log-uniform": Arm("posaug", {"law": "log-uniform"}),
        "downscale-only": Arm("posaug", {"high": 1.0}),
        "upper-only": Arm("posaug", {"low": 1.0}),
        "step": Arm("posaug", {"curriculum": "step"}),
        # ours: an alpha for each row, and skips that reach as far
        "uniform, rows": Arm("posaug", of_rows),
        "step, rows": Arm("posaug", {**of_rows, "curriculum": "step"}),
        "skip": Arm("skip", {"max_skip": far}),
        "skip, log": Arm("skip", {"max_skip": far, "law": "log-uniform"}),
        "step 1/16..16": Arm("posaug", {"low": 1 / 16, "high": 16.0, "curriculum": "step"}),
        "bottom": Arm("per-layer", {"view": posaug, "layers": "bottom"}),
        "top": Arm("per-layer", {"view": posaug, "layers": "top"}),
        "independent": Arm("per-layer", {"view": posaug, "layers": "independent"}),
        "rpe": Arm("rpe", {"max_index": 8 * window}),
        "fixed-4": Arm("posaug", {"low": 4.0, "high": 4.0}),
        "discrete": Arm("posaug", {"law": "discrete"}),
        "random-base": Arm("random-base"),
    }
    trained_on = {
        "continued": Arm(steps=retrofit, after="baseline"),  # the control: as many steps more without a view
        "retrofit": Arm("posaug", steps=retrofit, after="baseline"),
        "retrofit, rows": Arm("posaug", of_rows, retrofit, "baseline"),
        "retrofit, skip": Arm("skip", {"max_skip": far}, retrofit, "baseline"),
    }
    known: dict[str, Arm] = {}
    for name, arm in {"baseline": scratch["baseline"], **trained_on, **scratch}.items():
        known[name] = arm
        known[f"{name}, YaRN"] = Arm(steps=0.0, after=name, yarn=True)
    return known
