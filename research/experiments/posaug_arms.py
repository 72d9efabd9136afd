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
    alpha: dict[str, Any] = {"law": "uniform", "low": 1 / 8, "high": 8.0}
    step = {**alpha, "curriculum": "step"}
    skip = {"law": "uniform", "high": far}
    values = [1.0, 2.0, 4.0, 8.0]
    scratch = {
        "baseline": Arm(),
        "uniform": Arm("posaug"),
        "log-uniform": Arm("posaug", {"alpha": {**alpha, "law": "log-uniform"}}),
        "downscale-only": Arm("posaug", {"alpha": {**alpha, "high": 1.0}}),
        "upper-only": Arm("posaug", {"alpha": {**alpha, "low": 1.0}}),
        "step": Arm("posaug", {"alpha": step}),
        # ours: an alpha for each row, and skips that reach as far
        "uniform, rows": Arm("posaug", of_rows),
        "step, rows": Arm("posaug", {**of_rows, "alpha": step}),
        "skip": Arm("skip", {"skip": skip}),
        "skip, log": Arm("skip", {"skip": {**skip, "law": "log-uniform"}}),
        "step 1/16..16": Arm("posaug", {"alpha": {**step, "low": 1 / 16, "high": 16.0}}),
        "bottom": Arm("per-layer", {"view": posaug, "layers": "bottom"}),
        "top": Arm("per-layer", {"view": posaug, "layers": "top"}),
        "independent": Arm("per-layer", {"view": posaug, "layers": "independent"}),
        "rpe": Arm("rpe", {"max_index": 8 * window}),
        "rpe, 16 windows": Arm("rpe", {"max_index": 16 * window}),
        "rfs": Arm("rpe", {"max_index": 8 * window, "values": "floats"}),
        "pose": Arm("pose", {"target": 8 * window}),
        "fixed-4": Arm("posaug", {"alpha": 4.0}),
        "fixed-8": Arm("posaug", {"alpha": 8.0}),
        "discrete": Arm("posaug", {"alpha": {"law": "discrete", "values": values}}),
        "cycling": Arm("posaug", {"alpha": {"law": "cycling", "values": values}}),
        "linear": Arm("posaug", {"alpha": {**alpha, "curriculum": "linear", "start": [1 / 2, 2.0]}}),
        "step, log": Arm("posaug", {"alpha": {**step, "law": "log-uniform"}}),
        "uniform 1/16..16": Arm("posaug", {"alpha": {**alpha, "low": 1 / 16, "high": 16.0}}),
        "random-base": Arm("random-base"),
    }
    trained_on = {
        "continued": Arm(steps=retrofit, after="baseline"),  # the control: as many steps more without a view
        "retrofit": Arm("posaug", steps=retrofit, after="baseline"),
        "retrofit, rows": Arm("posaug", of_rows, retrofit, "baseline"),
        "retrofit, skip": Arm("skip", {"skip": skip}, retrofit, "baseline"),
    }
    known: dict[str, Arm] = {}
    for name, arm in {"baseline": scratch["baseline"], **trained_on, **scratch}.items():
        known[name] = arm
        known[f"{name}, YaRN"] = Arm(steps=0.0, after=name, yarn=True)
    return known
