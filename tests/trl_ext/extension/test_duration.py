"""Operations of a step, counted, and beside what was measured on an H200."""

import pytest

from trl_ext.extension.duration import Rate, forward_operations, step_operations
from trl_ext.extension.facts import ModelSize
from trl_ext.extension.memory import Step
from trl_ext.extension.plan import _hours

SIZE = ModelSize(
    parameters=8_030_261_248, in_layers=6_979_588_096, qkv=805_306_368, lora_per_rank=851_968, n_layers=32, n_full=32,
    sliding_window=0, hidden=4096, norms=2, normed=0, intermediate=14336, queries=4096, keys=1024, vocabulary=128256,
)  # fmt: skip
PEAK = 790e12  # of an H200's products of large matrices in bfloat16


@pytest.mark.parametrize(("length", "tokens_per_second"), [(8192, 8537), (16384, 7501), (32768, 6083), (65536, 4294)])
def test_minutes_are_within_their_roughness_of_what_was_measured(length, tokens_per_second):
    """Llama-3-8B, next-token steps of LoRA: docs/results/self-distill-step-h200.json, distillation-step-h200.json."""
    step = Step("lora", 64, length, True, True, False)
    seconds = Rate(PEAK, 1e-5).seconds(step_operations(SIZE, step, length), 0)
    assert length / tokens_per_second / 2 < seconds < 2 * length / tokens_per_second


def test_operations_grow_with_what_is_done():
    def operations(train="all", checkpointing=False, teacher=False, length=8192):
        return step_operations(SIZE, Step(train, 8, length, True, checkpointing, teacher), length)

    plain = operations()
    assert operations("lora") < plain < operations(checkpointing=True) and plain < operations(teacher=True)
    assert 2 * plain < operations(length=16384), "attention grows by the square"
    assert plain == pytest.approx(6 * SIZE.parameters * 8192, rel=0.15)
    assert forward_operations(SIZE, 8192) < plain / 3


def test_a_small_step_takes_as_long_as_it_takes_to_start_its_operations():
    rate = Rate(1e15, 1e-5)
    assert rate.seconds(1e6, 1000) == pytest.approx(0.01) and rate.seconds(6e14, 1000) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("minutes", "said"), [(0.2, "1 minute"), (1.4, "1 minute"), (1.6, "2 minutes"), (119, "119 minutes"), (130, "2 hours")]
)
def test_minutes_in_words(minutes, said):
    assert _hours(minutes) == said
