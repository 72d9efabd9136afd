"""Who may set the clock of draws, to what, and who needs it."""

import pytest
import torch
from support.tiny import tiny, tokens

from rope_patch import patch_model, rope_view
from rope_patch.forward.draw_clock import DrawClock, progress_at
from rope_patch.patch import view_source
from rope_patch.views import Compose, Linear, PerLayer, PosAug, Skip, Step, Uniform


@pytest.mark.parametrize("progress", [1.01, -0.1, float("nan")])
def test_progress_out_of_range_is_refused_and_the_clock_stays_as_it_was(progress):
    clock = DrawClock(0)
    with pytest.raises(ValueError, match=f"progress must be a number from 0, .* got {progress}"):
        clock.set(0, 0, progress)
    assert (int(clock.step), int(clock.first_sample), float(clock.progress), clock.is_set) == (0, 0, 1.0, False)


def test_a_clock_is_on_the_cpu_whatever_the_default_device():
    with torch.device("meta"):
        clock = DrawClock(0)
    assert (int(clock.step), int(clock.first_sample), float(clock.progress)) == (0, 0, 1.0)


def test_progress_goes_from_the_first_step_to_the_last():
    assert [progress_at(step, 5) for step in range(5)] == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert progress_at(0, 1) == progress_at(7, 5) == progress_at(0, -1) == 1.0, "nothing is behind the end"


@pytest.mark.parametrize("n_steps", [2, 3, 10, 64, 1000])
def test_a_share_of_the_steps_that_is_a_number_of_them_is_that_number(n_steps):
    for before in range(1, n_steps):
        assert sum(progress_at(step, n_steps) < before / n_steps for step in range(n_steps)) == before


@pytest.mark.parametrize(
    "view",
    [
        PosAug(Step(Uniform(1 / 8, 8))),
        Skip(skip=Linear(Uniform(1, 90), start=0)),
        Compose([PosAug(), Skip(skip=Step(Uniform(1)))]),
        PerLayer(PosAug(Linear(Uniform(1 / 8, 8), start=[0.5, 2])), "top"),
    ],
    ids=lambda view: view.name,
)
@torch.no_grad()
def test_a_curriculum_needs_somebody_who_tells_how_far_training_is(view):
    model, ids = patch_model(tiny(), view).train(), tokens(1, 12)
    with pytest.raises(ValueError, match=r"curriculum.*Trainer.*view_source\(model\).clock.set_step\(step"):
        model(ids)
    with pytest.raises(ValueError, match="has a curriculum"), rope_view(model, view):
        model(ids)
    early = []
    for progress in (0.0, 0.9):
        view_source(model).clock.set(3, 0, progress)
        early.append(model(ids).logits)
    assert not torch.equal(*early)
    assert model.eval()(ids).logits.isfinite().all(), "evaluation has no view, so it needs no clock"
