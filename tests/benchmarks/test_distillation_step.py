"""A step's time: draws that come again, and rounds that are timed apart."""

import distillation_step
import pytest
import torch

from rope_patch.base.draws import DrawKey


def test_draws_of_a_round_come_again_and_do_the_mean_work():
    seed = distillation_step.balanced_seed(4)
    view = distillation_step.RepeatedSkip(period=4)
    length = torch.tensor([[1 << 16]])
    draws = [
        view.draw(length, DrawKey(seed, torch.tensor(step), torch.zeros(1, 1, dtype=torch.int64)))["split"].item()
        for step in range(8)
    ]
    assert draws[:4] == draws[4:] and len(set(draws)) == 4
    assert sum(draws[:4]) / 4 / (1 << 16) == pytest.approx(0.5, abs=0.01)


def test_two_rounds_are_timed_apart_and_one_step_alone():
    watch = distillation_step.Watch(3)
    watch.seconds = [9.0, 6.0]
    assert watch.rates(100) == {"tokens_per_second": 50.0, "seconds_more_at_first": 1.0}
    watch.seconds = [9.0, 0.0]
    assert watch.rates(100) == {"seconds_of_one_step": 9.0}
