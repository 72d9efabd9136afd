"""Every objective keeps what `check_objective` asks for, and one that breaks a promise is named with it."""

import pytest
import torch
from support.packages import installed
from support.scaled_states import ScaledStates

from rope_patch.views import Uniform
from trl_ext.objectives import OBJECTIVES
from trl_ext.testing import check_batching, check_evaluation, check_objective, check_resuming

OBJECTIVES.pop("scaled-states")  # which the import has registered
YARN = {"rescale": "yarn", "rescale_args": {"factor": 4.0}}
SKIP = {"view": "skip", "view_args": {"skip": Uniform(1, 40)}}
SETTINGS = {
    "clm": {**SKIP, "objective_args": {"longce": {"short_context": 6, "stride": 4}}},
    "self-distill": SKIP,
    "relation-distill": YARN,
    "hidden-distill": YARN,
    "native-distill": {**YARN, **SKIP},
}


def test_every_objective_is_here():
    assert set(SETTINGS) == set(OBJECTIVES)


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_every_objective_keeps_what_it_promises(name):
    check_objective(objective=name, **SETTINGS[name])


class OfTheBatch(ScaledStates):
    """Divides by the tokens of a batch."""

    def loss(self, model, inputs, read, counts, batch_counts):
        return super().loss(model, inputs, read, batch_counts, batch_counts)


class Noisy(ScaledStates):
    """Draws from torch's generator."""

    def loss(self, *batch):
        loss, parts = super().loss(*batch)
        return loss * (1 + torch.rand(())), parts


class Trains(ScaledStates):
    """Changes the model in each forward."""

    def loss(self, model, *batch):
        with torch.no_grad():
            next(model.parameters()).mul_(1.5)
        return super().loss(model, *batch)


class Remembers(ScaledStates):
    """Weighs a step by what no checkpoint holds: the number of batches before it."""

    n_batches = 0

    def loss(self, *batch):
        self.n_batches += 1
        loss, parts = super().loss(*batch)
        # of the gradients, too, not of their size alone, which Adam does not see
        return loss + self.n_batches**2 * parts["square"][0].sqrt() / 100, parts


@pytest.mark.parametrize(
    ("objective", "check", "broken"),
    [
        (
            OfTheBatch,
            check_batching,
            "loss of a step is .* in one batch and .* accumulated: divide the sums of",
        ),
        (Noisy, check_evaluation, "two evaluations give losses of"),
        (Trains, check_evaluation, "two evaluations give|an evaluation changes model.embed_tokens.weight"),
        (Remembers, check_resuming, "a run that was resumed ends with another"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_a_promise_that_is_broken_is_named(objective, check, broken, tmp_path, monkeypatch):
    monkeypatch.setitem(OBJECTIVES, "broken", objective)
    with pytest.raises(AssertionError, match=broken):
        check(tmp_path, {"objective": "broken"})


def test_an_objective_of_somebody_else_is_checked(tmp_path):
    code = "from support.scaled_states import ScaledStates\nfrom trl_ext.objectives import OBJECTIVES\n"
    code += "OBJECTIVES.register('scaled-states')(ScaledStates)"
    with installed(tmp_path / "site", "of_scaled", code, objectives=["scaled-states"]):
        check_batching(tmp_path, {"objective": "scaled-states", "objective_args": {"scale": {"factor": 2.0}}})
