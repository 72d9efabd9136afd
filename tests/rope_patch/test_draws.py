import pytest
import torch
from support.tiny import tiny, tokens

from rope_patch import patch_model, rope_view
from rope_patch.draw_clock import DrawClock
from rope_patch.draws import DrawKey, philox4x32
from rope_patch.patch import view_source
from rope_patch.views import Compose, PerLayer, PosAug, Skip


def key(seed=0, step=0, samples=4, stream=0):
    return DrawKey(seed, torch.tensor(step), torch.arange(samples)[:, None], stream)


@pytest.mark.parametrize(
    ("counter", "words", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_philox_gives_the_known_answers_of_its_authors(counter, words, expected):
    assert philox4x32(tuple(torch.tensor(c) for c in counter), words) == expected


def test_a_draw_depends_on_seed_step_sample_stream_and_slot():
    base = key().uniform(0)
    assert torch.equal(base, key().uniform(0))
    others = [key(seed=1), key(seed=1 << 32), key(step=1), key(stream=1), key().substream(0)]
    assert all(not torch.any(base == other.uniform(0)) for other in others)
    assert not torch.any(base == key().uniform(1))
    assert len(base.unique()) == 4


def test_a_sample_draws_the_same_in_any_batch():
    assert torch.equal(key(samples=8).uniform(0)[:4], key(samples=4).uniform(0))


def test_per_step_draws_are_shared_by_all_samples():
    assert key().per_step().uniform(0).shape == ()
    assert key(step=5, samples=2).per_step().uniform(0) == key(step=5, samples=9).per_step().uniform(0)


@pytest.mark.parametrize("step", [0, 5, 2**31 + 7, -1])
def test_a_step_that_is_a_number_draws_the_same_as_one_that_is_a_tensor(step):
    sample = torch.arange(3)[:, None]
    number, tensor = (
        DrawKey(2**40 + 3, step, sample, stream=9),
        DrawKey(2**40 + 3, torch.tensor(step), sample, stream=9),
    )
    for first, second in ((number, tensor), (number.per_step(), tensor.per_step())):
        assert torch.equal(first.uniform(1), second.uniform(1)) and first.uniform(1).dtype == torch.float64
        assert torch.equal(first.integers(-3, 2**30, 4), second.integers(-3, 2**30, 4))
        assert torch.equal(first.integers(0, torch.tensor([[5]]), 4), second.integers(0, torch.tensor([[5]]), 4))
        assert torch.equal(first.turn(7), second.turn(7)) and first.turn(7) == step % 7


def test_uniform_has_the_moments_of_the_uniform_law():
    u = key(samples=200_000).uniform(0)
    assert u.dtype == torch.float64 and 0 <= u.min() and u.max() < 1
    assert abs(u.mean() - 1 / 2) < 5 / (12 * 200_000) ** 0.5
    assert abs(u.var() - 1 / 12) < 1e-3


def test_integers_cover_both_ends_evenly():
    drawn = key(samples=60_000).integers(3, 8, slot=0)
    counts = torch.bincount(drawn.flatten(), minlength=9)
    assert counts[:3].sum() == 0
    assert (counts[3:] - 10_000).abs().max() < 5 * (60_000 * (1 / 6) * (5 / 6)) ** 0.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1.5, 0), "step must be an integer in .*got 1.5"),
        ((True, 0), "step must be an integer in .*got True"),
        ((2**63, 0), "step must be an integer in"),
        ((0, -1), "first_sample must be an integer in \\[0, .*got -1"),
        ((0, "3"), "first_sample must be an integer in .*got '3'"),
        ((0, 0, 1.01), "progress must be a number from 0, .* got 1.01"),
        ((0, 0, -0.1), "progress must be a number from 0, .* got -0.1"),
        ((0, 0, float("nan")), "progress must be a number from 0, .* got nan"),
        ((0, 0, "half"), "progress must be a number from 0, .* got 'half'"),
        ((0, 0, True), "progress must be a number from 0, .* got True"),
    ],
)
def test_a_clock_takes_numbers_alone_and_stays_as_it_was(arguments, message):
    clock = DrawClock(0)
    with pytest.raises(ValueError, match=message):
        clock.set(*arguments)
    assert (int(clock.step), int(clock.first_sample), float(clock.progress), clock.is_set) == (0, 0, 1.0, False)


@pytest.mark.parametrize(
    "view",
    [
        PosAug(curriculum="step"),
        Skip(curriculum="linear", max_skip=90),
        Compose([PosAug(), Skip(curriculum="step")]),
        PerLayer(PosAug(curriculum="linear"), "top"),
    ],
    ids=lambda view: view.name,
)
@torch.no_grad()
def test_a_curriculum_needs_somebody_who_tells_how_far_training_is(view):
    model, ids = patch_model(tiny(), view).train(), tokens(1, 12)
    with pytest.raises(ValueError, match=r"curriculum.*RopeSFTTrainer.*view_source\(model\).clock.set\(step"):
        model(ids)
    with pytest.raises(ValueError, match="has a curriculum"), rope_view(model, view):
        model(ids)
    early = []
    for progress in (0.0, 0.9):
        view_source(model).clock.set(3, 0, progress)
        early.append(model(ids).logits)
    assert not torch.equal(*early)
    assert model.eval()(ids).logits.isfinite().all(), "evaluation has no view, so it needs no clock"
