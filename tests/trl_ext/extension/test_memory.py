"""The arithmetic of memory against what was measured, docs/results/*.json, on an H200."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from trl_ext.extension.facts import ModelSize
from trl_ext.extension.memory import Step, peak_memory

RESULTS = Path(__file__).parents[3] / "docs" / "results"
GIB = 1 << 30
SHAPES = {
    "llama-3-8b": {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    },
    "qwen3-4b": {
        "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "tie_word_embeddings": True,
    },
    "smollm2-135m": {
        "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True,
    },
}  # fmt: skip


def size(shape):
    with torch.device("meta"):
        return ModelSize.of(AutoModelForCausalLM.from_config(AutoConfig.for_model(**SHAPES[shape])))


def steps_of_llama_and_qwen():
    """One row a step, weights in bfloat16, adapters in float32."""
    for name in ("self-distill-step-h200.json", "distillation-step-h200.json"):
        for run in json.loads((RESULTS / name).read_text())["runs"]:
            if run["run"] == "clm":
                train = "lora" if run["lora_rank"] else "all"
                yield pytest.param(
                    run["shape"],
                    {"train": train, "lora_rank": run["lora_rank"], "accumulates": False, "weight_bytes": 2},
                    run["length"],
                    run["peak_gib"],
                    id=f"{run['shape']}-{run['length']}",
                )


def steps_of_smollm2():
    """Weights in float32 under autocast; rows of 8192, one or four at once, or one of 65536."""
    found = set()
    for line in (RESULTS / "extension-cost-h200.jsonl").read_text().splitlines():
        run = json.loads(line)
        if run["method"] not in ("pose", "full length"):
            continue
        length = (65536 if run["method"] == "full length" else 8192) * run["rows_at_once"]
        if length not in found:
            found.add(length)
            more = {"train": "all", "lora_rank": 0, "accumulates": run["rows_a_step"] > run["rows_at_once"]}
            yield pytest.param("smollm2-135m", more, length, run["peak_gib"], id=f"smollm2-{length}")


@pytest.mark.parametrize(("shape", "more", "length", "measured"), [*steps_of_llama_and_qwen(), *steps_of_smollm2()])
def test_the_plan_is_near_what_a_step_took(shape, more, length, measured):
    step = Step(row_length=length, autocast=True, checkpointing=True, teacher=False, **more)
    planned = peak_memory(size(shape), step).total / GIB
    assert planned == pytest.approx(measured, rel=0.15)


def test_each_way_to_save_memory_saves_it():
    def total(train, checkpointing):
        of_lora = 2 if train == "lora" else 4
        step = Step(train, 64, 8192, True, checkpointing, True, weight_bytes=of_lora)
        return peak_memory(size("llama-3-8b"), step).total

    ways = [total(train, on) for train in ("all", "qkv", "lora") for on in (False, True)]
    assert ways[0] > ways[1] > ways[3] > ways[5] and ways[2] > ways[3] and ways[4] > ways[5]


def test_a_teacher_costs_a_copy_of_the_weights_unless_adapters_are_trained():
    def teacher(train):
        return peak_memory(size("smollm2-135m"), Step(train, 8, 1024, True, True, True)).teacher

    assert teacher("all") == teacher("qkv") == 4 * 134_515_008 and teacher("lora") == 0


def test_parameters_are_counted_as_they_are_tied():
    assert size("smollm2-135m").parameters == 134_515_008
    assert size("llama-3-8b").parameters == 8_030_261_248
