"""Rounding told from mistakes, in 16 bits and in 32."""

import pytest
import torch
from support.tiny import gemma3, tiny

from rope_patch.attention.rounding import SAMPLES, differs_by_rounding, inputs_rounded_otherwise


@pytest.mark.parametrize("rounding", [0.0, 1e-6, 0.03, 0.1])
@pytest.mark.parametrize("seed", range(3))
def test_what_is_off_as_rounding_is_passes_and_what_is_off_by_more_does_not(rounding, seed):
    torch.manual_seed(seed)
    plain = torch.randn(SAMPLES, 400)
    # of single samples rounding is ten times what it is of others

    def off(size):
        return plain + size * torch.randn(SAMPLES, 1).exp() * torch.randn(SAMPLES, 400)

    assert differs_by_rounding(off(rounding), plain, off(rounding))
    assert not differs_by_rounding(off(max(6 * rounding, 1e-3)), plain, off(rounding))


def test_a_way_that_rounds_alike_by_chance_makes_no_mistake_of_the_other():
    plain = torch.randn(SAMPLES, 400).bfloat16()
    assert differs_by_rounding(plain + 0.02 * torch.randn(SAMPLES, 400).bfloat16(), plain, plain)
    assert not differs_by_rounding(plain.float() + 0.02 * torch.randn(SAMPLES, 400), plain.float(), plain.float())


def test_what_is_not_finite_is_not_rounding():
    plain = torch.randn(SAMPLES, 8)
    assert not differs_by_rounding(plain * float("nan"), plain, plain)
    assert differs_by_rounding(plain, plain, plain)


def test_outputs_without_any_spread_are_alike_if_they_are_the_same():
    plain = torch.ones(SAMPLES, 8)
    assert differs_by_rounding(plain, plain, plain)
    assert not differs_by_rounding(2 * plain, plain, plain)


def test_what_moves_outputs_in_every_way_is_not_rounding():
    plain = torch.randn(SAMPLES, 8)
    assert not differs_by_rounding(1.6 * plain, plain, 1.6 * plain)


@torch.no_grad()
@pytest.mark.parametrize(("make", "dtype"), [(tiny, torch.float32), (gemma3, torch.bfloat16), (tiny, torch.float16)])
def test_embeddings_move_by_a_digit_each_way_and_back(make, dtype):
    model = make().to(dtype)
    embed, ids = model.get_input_embeddings(), torch.arange(64).view(2, 32) % 40
    before = embed(ids)
    with inputs_rounded_otherwise(model):
        moved = embed(ids)
    change = (moved.double() - before.double())[before != 0] / before.double()[before != 0]
    assert 0.4 < (change > 0).double().mean() < 0.6
    assert change.abs().max() <= 1.01 * torch.finfo(dtype).eps and change.abs().mean() > torch.finfo(dtype).eps / 4
    assert embed(ids).equal(before)
