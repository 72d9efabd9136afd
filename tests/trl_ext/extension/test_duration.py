"""Operations of a step, counted, and beside what was measured on an H200."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.shapes import size

from trl_ext.extension.duration import (
    H200,
    Rate,
    export_seconds,
    forward_operations,
    loading_seconds,
    saving_seconds,
    step_calls,
    step_operations,
)
from trl_ext.memory.size import ModelSize
from trl_ext.memory.step import Step

SIZE = ModelSize(
    parameters=8_030_261_248, in_layers=6_979_588_096, qkv=805_306_368, lora_per_rank=851_968, n_layers=32, n_full=32,
    sliding_window=0, hidden=4096, norms=2, normed=0, intermediate=14336, queries=4096, keys=1024, vocabulary=128256,
)  # fmt: skip
EXTENSIONS = json.loads((Path(__file__).parents[3] / "research" / "results" / "extension-memory-h200.json").read_text())
PEAK = 790e12  # of an H200's products of large matrices in bfloat16


@pytest.mark.parametrize(("length", "tokens_per_second"), [(8192, 8529), (16384, 7501), (32768, 6083), (65536, 4294)])
def test_minutes_of_next_token_steps_are_a_third_off_at_most(length, tokens_per_second):
    """Llama-3-8B, LoRA, the GPU alone: research/results/self-distill-step-h200.json, distillation-step-h200.json."""
    step = Step("lora", 64, length, True, True, False)
    seconds = Rate(PEAK, 1.1e-5).seconds(step_operations(SIZE, step, length), step_calls(SIZE, step))
    assert length / tokens_per_second / 1.15 < seconds < 1.35 * length / tokens_per_second


@pytest.mark.parametrize("run", [pytest.param(run, id=run["case"]) for run in EXTENSIONS["runs"]])
def test_minutes_are_near_what_a_step_of_extend_took(run):
    rate, shape = Rate(**run["rate"]), size(run["shape"])
    if run.get("busy"):  # other processes slowed the calibration's small operations
        rate = replace(rate, call=H200.call)
    train = "lora" if run["train"] == "qlora" else run["train"]
    step = Step(train, 64, run["length"], True, run["checkpointing"], run["objective"] == "native-distill")
    seconds = rate.seconds(step_operations(shape, step, run["length"]), step_calls(shape, step))
    assert seconds == pytest.approx(run["seconds_a_row"], rel=0.15)


def test_a_sliding_window_costs_all_pairs_where_a_mask_says_it_and_little_where_none_is_made():
    narrow, wide = (replace(size("gemma3-270m"), sliding_window=n) for n in (512, 1 << 20))

    def operations(shape, length):
        return step_operations(shape, Step("all", 0, length, True, True, True), length)

    assert operations(narrow, 16383) > 1.5 * operations(wide, 16383)
    assert operations(narrow, 16384) < operations(wide, 16384) < operations(narrow, 16383)
    assert forward_operations(narrow, 32768) < forward_operations(wide, 32768)


def test_blocks_of_queries_are_started_one_by_one():
    def calls(window, length):
        return step_calls(replace(size("gemma3-270m"), sliding_window=window), Step("all", 0, length, True, True, True))

    plain = calls(0, 32768)
    assert calls(512, 16383) == plain < calls(512, 16384)
    assert calls(512, 32768) - plain == 2 * (calls(512, 16384) - plain) == 2 * (calls(1024, 16384) - plain)


def test_operations_grow_with_what_is_done():
    def operations(train="all", checkpointing=False, teacher=False, length=8192):
        return step_operations(SIZE, Step(train, 8, length, True, checkpointing, teacher), length)

    plain = operations()
    assert operations("lora") < plain < operations(checkpointing=True) and plain < operations(teacher=True)
    assert 2 * plain < operations(length=16384), "attention grows by the square"
    assert plain == pytest.approx(6 * SIZE.parameters * 8192, rel=0.15)
    assert forward_operations(SIZE, 8192) < plain / 3


def test_an_export_without_room_on_the_gpu_takes_as_long_as_measured():
    """93 seconds from the last step of Llama-3-8B's shape on an H200 to its checked checkpoint, on 32 busy cores."""
    half = 2 * SIZE.parameters
    on_host, on_gpu = (export_seconds(SIZE, half, "cuda", H200, gib << 30) for gib in (24, 80))
    assert on_host == pytest.approx(93, rel=0.15) and on_gpu < on_host / 2
    assert export_seconds(SIZE, 2 * half, "cuda", H200, 80 << 30) - on_gpu == pytest.approx(half / 0.67e9)


def test_what_loading_and_saving_took_on_two_h200s():
    """Qwen3-8B's 16.4 GB: 23 s to a first step; 12 s each for two checkpoints of a LoRA by FSDP2, 11 at the end."""
    qwen, shape = 2 * 8_190_735_360, size("qwen3-8b")
    assert loading_seconds(qwen, 2) == pytest.approx(23, rel=0.15) and loading_seconds(qwen, 1) < 6
    trained = 12 * 64 * shape.lora_per_rank
    assert saving_seconds(trained, qwen, 2) == pytest.approx(12 + 12 + 11, rel=0.15)
    assert saving_seconds(trained, 0, 2) < 2, "on one GPU nothing is gathered"


def test_what_a_step_computes_and_what_it_starts_both_take_time():
    rate = Rate(1e15, 1e-5)
    assert rate.seconds(0, 1000) == pytest.approx(0.01) and rate.seconds(6.2e14, 1000) == pytest.approx(1.01)
