"""Intervals of losses hold the truth as often as they say, however alike the parts of a text are."""

import math

import pytest
import torch

from rope_patch.eval import LossByPosition, regressions
from rope_patch.eval.results.loss_intervals import interval_over_blocks, interval_over_rows
from rope_patch.eval.results.paired import student_t

TEXTS = 1000  # 95 % intervals of so many leave out the truth 50 times, with a standard deviation of 7


def differences(n_texts, n_rows, n_blocks, alike, of_row, seed=0):
    """[n_texts, n_rows, n_blocks] with mean 0: AR(1) along a row, and a part that all blocks of a row share."""
    draws = torch.Generator().manual_seed(seed)
    noise = torch.randn(n_texts, n_rows, n_blocks, generator=draws, dtype=torch.float64)
    blocks = [noise[..., 0]]
    for k in range(1, n_blocks):
        blocks.append(alike * blocks[-1] + math.sqrt(1 - alike**2) * noise[..., k])
    rows = of_row * torch.randn(n_texts, n_rows, 1, generator=draws, dtype=torch.float64)
    return torch.stack(blocks, -1) + rows


def called_lost_or_won(per_block):
    """Whether the verdict calls a cell lost or won, of a model whose losses differ so, [n_rows, n_blocks]."""
    curves = {}
    for label, blocks in (("native", torch.zeros_like(per_block)), ("other", per_block)):
        rows = tuple(map(tuple, (2 + blocks).tolist()))
        curves[label] = LossByPosition(
            torch.zeros(64 * len(rows[0]), dtype=torch.float64), len(rows), None, rows, "same"
        )
    (cell,) = regressions({"cliff": curves}).cells
    return cell.outcome != "same"


@pytest.mark.parametrize(
    ("n_rows", "alike", "of_row"), [(2, 0.5, 1.0), (2, 0.8, 0.0), (4, 0.0, 0.0), (8, 0.8, 0.0), (24, 0.5, 1.0)]
)
def test_equal_models_are_told_apart_once_in_twenty(n_rows, alike, of_row):
    """Eight parts of a row as pairs of their own call 29 to 51 of 100 cells of two to eight alike rows lost or won."""
    called = sum(map(called_lost_or_won, differences(TEXTS, n_rows, 17, alike, of_row, seed=n_rows)))
    assert called / TEXTS <= 0.07


@pytest.mark.parametrize(("n_blocks", "alike"), [(9, 0.0), (9, 0.5), (33, 0.5), (129, 0.5)])
def test_one_text_whose_neighbouring_blocks_are_alike_tells_equal_models_apart_once_in_twenty(n_blocks, alike):
    called = sum(map(called_lost_or_won, differences(TEXTS, 1, n_blocks, alike, 0.0, seed=n_blocks)))
    assert called / TEXTS <= 0.075


def test_a_difference_in_all_rows_is_seen():
    found = [called_lost_or_won(0.5 + 0.2 * rows) for rows in differences(100, 4, 17, 0.5, 0.0)]
    assert sum(found) >= 95
    found = [called_lost_or_won(0.5 + 0.2 * row) for row in differences(100, 1, 65, 0.5, 0.0)]
    assert sum(found) >= 95


def test_rows_have_the_interval_of_a_t_test():
    low, high = interval_over_rows([0.1, 0.2, 0.6])
    half = 4.3027 * math.sqrt(0.07 / 3)
    assert (low, high) == (pytest.approx(0.3 - half, rel=1e-4), pytest.approx(0.3 + half, rel=1e-4))


def test_blocks_have_the_long_run_variance_of_their_slowest_waves():
    """Four blocks have one wave, cos(pi (k + 1/2) / 4)."""
    values = [0.1, 0.4, 0.2, 0.9]
    wave = math.sqrt(0.5) * sum(d * math.cos(math.pi * (k + 0.5) / 4) for k, d in enumerate(values))
    half = 12.7062 * abs(wave) / 2
    low, high = interval_over_blocks(values)
    assert (low, high) == (pytest.approx(0.4 - half, rel=1e-4), pytest.approx(0.4 + half, rel=1e-4))


@pytest.mark.parametrize("interval", [interval_over_rows, interval_over_blocks])
def test_equal_differences_have_no_width_and_no_number_gives_none(interval):
    assert interval([0.0] * 40) == (0.0, 0.0) and interval([0.25] * 8) == (0.25, 0.25)
    assert all(map(math.isnan, interval([0.1, math.nan])))


def test_students_t_with_few_degrees_of_freedom_is_that_of_the_tables():
    assert [student_t(0.975, n) for n in (1, 2, 3)] == pytest.approx([12.7062, 4.3027, 3.1824], rel=2e-3)
