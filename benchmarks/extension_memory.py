"""Peak memory and seconds of a training step, as `rope-patch extend` plans them and as measured.

Run:   python benchmarks/extension_memory.py [--cases NAME ...] [--steps 4] [--out FILE.json]
Case:  a shape with random weights, trained as `extend` trains: native model as teacher, half of the rows with gaps in
their positions, steps of two rows. Seconds are of the steps behind the first two, of two steps behind the first.
"""

import argparse
import gc
import json
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from distillation_step import SHAPES, stand_in_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback
from trl import get_quantization_config

from trl_ext import RopeSFTTrainer
from trl_ext.extension.choices import Choice, Choices
from trl_ext.extension.duration import step_operations
from trl_ext.extension.facts import ModelFacts
from trl_ext.extension.machine import GIB, Machine
from trl_ext.extension.options import ExtendOptions
from trl_ext.extension.training import recipe
from trl_ext.memory.size import ModelSize
from trl_ext.memory.step import peak_memory
from trl_ext.recipes.adapter_config import adapter_config
from trl_ext.recipes.stages import read_stages

SHAPES |= {
    "gemma3-270m": {
        "model_type": "gemma3_text", "vocab_size": 262144, "hidden_size": 640, "intermediate_size": 2048,
        "num_hidden_layers": 18, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256,
        "sliding_window": 512, "max_position_embeddings": 32768,
    },
    "llama-3.2-1b": {
        "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": True,
        "max_position_embeddings": 8192,
    },
}  # fmt: skip
# name -> shape, row length, what is trained, gradient checkpointing, objective
CASES = {
    "smollm2 all": ("smollm2-135m", 8192, "all", False, "native-distill"),
    "smollm2 all checkpointing": ("smollm2-135m", 8192, "all", True, "native-distill"),
    "smollm2 all clm": ("smollm2-135m", 8192, "all", False, "clm"),
    "smollm2 qkv": ("smollm2-135m", 8192, "qkv", False, "native-distill"),
    "smollm2 lora": ("smollm2-135m", 8192, "lora", False, "native-distill"),
    "gemma3 all checkpointing": ("gemma3-270m", 32768, "all", True, "native-distill"),
    "llama-1b all": ("llama-3.2-1b", 8192, "all", False, "native-distill"),
    "llama-1b all checkpointing": ("llama-3.2-1b", 32768, "all", True, "native-distill"),
    "qwen3-4b lora checkpointing": ("qwen3-4b", 16384, "lora", True, "native-distill"),
    "llama-8b lora": ("llama-3-8b", 8192, "lora", False, "native-distill"),
    "llama-8b lora checkpointing": ("llama-3-8b", 32768, "lora", True, "native-distill"),
    "qwen3-8b lora checkpointing": ("qwen3-8b", 32768, "lora", True, "native-distill"),
    "llama-8b qlora": ("llama-3-8b", 8192, "qlora", False, "native-distill"),
    "qwen3-8b qlora checkpointing": ("qwen3-8b", 32768, "qlora", True, "native-distill"),
}


class Clock(TrainerCallback):
    """Seconds of the steps behind the first two, or of the second of two."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())

    @property
    def seconds(self) -> float:
        first = min(2, len(self.ends) - 1)
        return (self.ends[-1] - self.ends[first - 1]) / (len(self.ends) - first)


def choices_of(length: int, train: str, checkpointing: bool, objective: str, window: int, precision: str) -> Choices:
    """The choices of `extend`, with the fields of a case replaced."""

    def one(value: Any) -> Choice:
        return Choice("", value, "", "", "your choice", "")

    pose = {"view": "pose", "target": 8 * window, "chunks": 4}
    native = {"weight": 1.0, "clm_weight": 1.0, "text_weight": 0.3} if objective == "native-distill" else {}
    return Choices(
        rescaling=one({"rescale": "ntk", "rescale_args": {"factor": 16.0}}),
        view=one({"view": "mix", "view_args": {"views": ["standard", pose]}}),
        objective=one({"objective": objective, "objective_args": native}),
        rows=one({"length": length}),
        weights=one({"train": train, "lora_rank": 64, "gradient_checkpointing": checkpointing}),
        rate=one(1e-4),
        precision=one(precision),
        evaluation=one(None),
    )


def run(name: str, steps: int) -> dict[str, Any]:
    shape, length, train, checkpointing, objective = CASES[name]
    config = AutoConfig.for_model(**{"model_type": "llama", **SHAPES[shape]})
    config.max_position_embeddings = max(config.max_position_embeddings, length)  # a native teacher reads no further
    on_gpu = torch.cuda.is_available()
    device, precision = ("cuda", "bf16") if on_gpu else ("cpu", "float32")
    choices = choices_of(length, train, checkpointing, objective, config.max_position_embeddings, precision)
    options = ExtendOptions(model=shape, to=1, data=("none",), output="", rows_per_step=2, device=device)
    tokenizer = stand_in_tokenizer(config.vocab_size)
    facts = ModelFacts(shape, config, tokenizer, config.max_position_embeddings, torch.bfloat16)
    keys = recipe(facts, options, choices, 2 * steps)
    with torch.device(device):
        dtype = getattr(torch, keys["dtype"])
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=dtype)
    size = ModelSize.of(model)
    rows = torch.randint(2, config.vocab_size, (2 * steps, length)).tolist()
    # as rows of `extend`: answers have labels, or for "clm" all tokens
    labelled = (
        [[0] * (length - 64) + [1] * 64] * len(rows) if objective == "native-distill" else [[1] * length] * len(rows)
    )
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        (stage,) = read_stages(keys, save_strategy="no", disable_tqdm=True, output_dir=folder)
        quantized = get_quantization_config(stage.model)
        if quantized is not None:  # weights are quantised as they are loaded, here without a file
            state = model.state_dict()
            kind, model = type(model), None
            model = kind.from_pretrained(
                None, config=config, state_dict=state, quantization_config=quantized, dtype=dtype
            )
            del state
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        trainer = RopeSFTTrainer(
            model,
            stage.training,
            train_dataset=Dataset.from_dict({"input_ids": rows, "completion_mask": labelled}),
            processing_class=tokenizer,
            peft_config=adapter_config(stage.model),
            callbacks=[clock],
        )
        for parameter in trainer.model.parameters():
            if quantized is not None and parameter.requires_grad:
                parameter.data = parameter.data.float()  # as `extend` does: TRL makes these adapters bfloat16
        trainer.train()
    planned = peak_memory(size, choices.step(device))
    return {
        "case": name,
        "shape": shape,
        "length": length,
        "train": train,
        "checkpointing": checkpointing,
        "objective": objective,
        "parameters": size.parameters,
        "peak_gib": torch.cuda.max_memory_allocated() / GIB if on_gpu else None,
        "planned_gib": planned.total / GIB,
        "planned": {part: round(value / GIB, 3) for part, value in asdict(planned).items()},
        "size": asdict(size),
        "seconds_a_row": clock.seconds / 2,  # of two rows a step
        "operations_a_row": step_operations(size, choices.step(device), length),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    machine = Machine.of("cuda" if torch.cuda.is_available() else "cpu")
    rate = machine.calibrate("bf16" if machine.bf16 else "float32")
    facts: dict[str, Any] = {
        "device": machine.name,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "runs": [],
    }
    print(facts, flush=True)
    for name in args.cases:
        try:
            facts["runs"].append({**run(name, args.steps), "rate": asdict(rate)})
            print({k: v for k, v in facts["runs"][-1].items() if k != "size"}, flush=True)
        except torch.OutOfMemoryError as error:
            print(f"{name}: {error}", flush=True)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if args.out:
            args.out.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
