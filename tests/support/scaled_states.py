"""An objective with options of its own, as a package of its own writes it."""

from dataclasses import dataclass

from trl_ext.objectives import OBJECTIVES, Objective, ObjectiveOptions


@dataclass(frozen=True, kw_only=True)
class Times:
    factor: float


@dataclass(frozen=True, kw_only=True)
class ScaledOptions(ObjectiveOptions):
    """Options of "scaled-states".

    Args:
        scale: what multiplies the loss; None is 1.
    """

    scale: Times | None = None


@OBJECTIVES.register("scaled-states")
class ScaledStates(Objective):
    """loss = factor (sum over tokens of |h|^2) / tokens of the step.

    When: Take it in tests.
    """

    help = "the mean square of last hidden states"
    options_class = ScaledOptions

    def loss(self, model, inputs, read, counts, batch_counts):
        (states,) = self.states(model, inputs, None)
        square = states[read].square().sum()
        factor = self.options.scale.factor if self.options.scale else 1.0
        return factor * square / counts["tokens"], {"square": (square, batch_counts["tokens"])}
