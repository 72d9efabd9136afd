"""What a step of an objective costs beside a plain next-token step: tokens per second, peak memory, where time goes.

Run:   python benchmarks/distillation_step.py [--runs relation-distill clm] [--shape llama-3-8b] [--length 8192]
           [--lora 64] [--nf4] [--steps 5 | --once] [--out FILE.json]
Shape: random weights in bf16, or 4-bit with --nf4, batch 1, PI 4x, adapters on q, k and v or, with --lora 0, all
weights trained, gradient checkpointing. With adapters the teacher of relation-distill is the same weights with adapters
off. The skip of self-distill splits rows at a place drawn anew in each of --steps steps; its seed is one whose steps
copy as many tokens, and keys for them, as uniform draws do on average. All steps are done twice: the first round meets
each split for the first time, for which cuDNN plans its attention, and the second is what the rate is of. Share of
time: of all kernels of a profiled step, those of the relation loss. --once does a single step whose split is in the
middle: how far memory goes.
"""

import argparse
import gc
import json
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from peft import LoraConfig
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback
from view_overhead import LLAMA3_8B, SMOLLM2_135M

from rope_patch.base.draws import DrawKey
from rope_patch.views import VIEWS, Skip
from rope_patch.views.base import Parameters
from trl_ext import RopeSFTConfig, RopeSFTTrainer

GIB = 1 << 30
SHAPES = {
    "llama-3-8b": LLAMA3_8B,
    "smollm2-135m": SMOLLM2_135M,
    "qwen3-4b": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
        "max_position_embeddings": 40960,
    },
    "qwen3-8b": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
    },
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
    },
}


@dataclass(frozen=True)
class RepeatedSkip(Skip):
    """A skip whose draws come again after `period` steps."""

    period: int = 1

    def draw(self, length: torch.Tensor, key: DrawKey) -> Parameters:
        return super().draw(length, replace(key, step=key.step % self.period))


RUNS: dict[str, dict[str, Any]] = {
    "clm": {"objective": "clm"},
    "relation-distill": {"objective": "relation-distill"},
    "self-distill": {"objective": "self-distill"},
    "self-distill with a bound": {"objective": "self-distill", "objective_args": {"max_copies": 0.5}},
    "self-distill in two passes": {"objective": "self-distill", "objective_args": {"passes": "two"}},
    "self-distill sequential": {"objective": "self-distill", "objective_args": {"passes": "sequential"}},
}
# functions of the kernels that a profile shows: those of the KL of rows and of its gradient
RELATION_KERNELS = (
    "_row_kl_fwd_kernel",
    "_relation_kl_bwd_kernel",
    "_row_kl_hopper_fwd_kernel",
    "relation_kl_hopper_bwd_kernel",
    "_relation_kl_measure_kernel",
    "_relation_kl_prepare_kernel",
    "_relation_kl_finish_kernel",
)


def balanced_seed(steps: int) -> int:
    """A seed whose steps have the mean work of uniform splits s: L/2 copies, which attend to L^2/3 keys."""
    of_steps = torch.arange(steps)[:, None]
    length = torch.tensor(1 << 20)  # tokens, so many that shares of it are nearly continuous
    for seed in range(100_000):
        split = Skip().draw(length, DrawKey(seed, of_steps, torch.zeros_like(of_steps)))["split"] / length
        if abs((1 - split).mean() - 1 / 2) < 0.005 and abs((1 - split**2).mean() - 2 / 3) < 0.01:
            return seed
    raise ValueError(f"--steps must be enough for balanced draws, at least 3, got {steps}.")


class Watch(TrainerCallback):
    """Seconds of the first and of the second round; the step after them is profiled and not timed."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.seconds = [0.0, 0.0]
        self.profile: profile | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        synchronize()
        if state.global_step == 2 * self.steps:  # behind both rounds
            self.profile = profile(activities=[ProfilerActivity.CUDA]) if torch.cuda.is_available() else None
            if self.profile is not None:
                self.profile.__enter__()
        self.begin = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        synchronize()
        if state.global_step <= 2 * self.steps:
            self.seconds[(state.global_step - 1) // self.steps] += time.perf_counter() - self.begin  # of its round
        elif self.profile is not None:
            self.profile.__exit__(None, None, None)

    def rates(self, length: int) -> dict[str, float]:
        """Tokens per second of the second round, and how much longer a step of the first one took."""
        first, second = self.seconds
        if not second:
            return {"seconds_of_one_step": first}
        return {
            "tokens_per_second": length * self.steps / second,
            "seconds_more_at_first": (first - second) / self.steps,
        }

    def kernels(self) -> dict[str, Any]:
        """Of the profiled step: seconds of all kernels, of the longest, and the share of the relation loss."""
        if self.profile is None:
            return {}
        times = {e.key: e.self_device_time_total / 1e6 for e in self.profile.key_averages()}  # seconds
        total = sum(times.values())
        relation = sum(t for name, t in times.items() if name in RELATION_KERNELS) / total
        longest = {name[:100]: round(times[name], 4) for name in sorted(times, key=lambda name: -times[name])[:16]}
        return {"kernel_seconds": total, "relation_share": relation, "kernels": longest}


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def build(shape: str, nf4: bool) -> Any:
    config = AutoConfig.for_model(**{"model_type": "llama", **SHAPES[shape]})
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16)
    if not nf4:
        return model
    # transformers quantizes while it loads a checkpoint
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        del model
        quantization = transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
        )
        return AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=quantization, dtype=torch.bfloat16, device_map={"": device}
        )


def run(name: str, args: argparse.Namespace) -> dict[str, Any]:
    model = build(args.shape, args.nf4)
    vocabulary = model.config.vocab_size
    n_steps = 1 if args.once else 2 * args.steps + 1  # the last one is profiled
    rows = torch.randint(0, vocabulary, (n_steps, args.length)).tolist()
    watch = Watch(n_steps if args.once else args.steps)
    view: dict[str, Any] = {}
    if RUNS[name]["objective"] == "self-distill" and args.once:
        view = {"view": "skip", "view_args": {"split": args.length // 2}}
    elif RUNS[name]["objective"] == "self-distill":
        view = {"view": "repeated-skip", "view_args": {"period": args.steps}, "view_seed": balanced_seed(args.steps)}
    device = {"bf16": True} if torch.cuda.is_available() else {"use_cpu": True, "bf16": False}
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder:
        trainer = RopeSFTTrainer(
            model=model,
            args=RopeSFTConfig(
                output_dir=folder,
                **RUNS[name],
                **view,
                rescale="pi",
                rescale_args={"factor": 4.0},
                per_device_train_batch_size=1,
                max_steps=len(rows),
                gradient_checkpointing=True,
                save_strategy="no",
                report_to=[],
                logging_steps=1,
                disable_tqdm=True,
                max_length=None,
                dataset_kwargs={"skip_prepare_dataset": True},
                **device,
            ),
            train_dataset=Dataset.from_dict({"input_ids": rows}),
            processing_class=stand_in_tokenizer(vocabulary),
            peft_config=LoraConfig(r=args.lora, lora_alpha=2 * args.lora, target_modules=["q_proj", "k_proj", "v_proj"])
            if args.lora
            else None,
            callbacks=[watch],
        )
        trainer.train()
    return {
        "run": name,
        **watch.rates(args.length),
        "peak_gib": torch.cuda.max_memory_allocated() / GIB if torch.cuda.is_available() else None,
        "weights_gib": sum(p.nbytes for p in model.parameters()) / GIB,
        **watch.kernels(),
    }


def stand_in_tokenizer(vocabulary: int) -> Any:
    """Rows are tokens already; the trainer wants a tokenizer for its padding token."""
    from tokenizers import Tokenizer, models

    words = {f"w{i}": i for i in range(vocabulary)}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")), pad_token="w0", eos_token="w1"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=["relation-distill", "clm"])
    parser.add_argument("--shape", choices=SHAPES, default="llama-3-8b")
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--lora", type=int, default=64)
    parser.add_argument("--nf4", action="store_true")
    parser.add_argument("--steps", type=int, default=5, help="of a round, of which there are two")
    parser.add_argument("--once", action="store_true", help="one step alone")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    VIEWS.register("repeated-skip")(RepeatedSkip)
    facts: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "shape": args.shape,
        "length": args.length,
        "steps": 1 if args.once else args.steps,
        "lora_rank": args.lora,
        "nf4": args.nf4,
        "runs": [],
    }
    for name in args.runs:
        facts["runs"].append(run(name, args))
        print(facts["runs"][-1], flush=True)
        gc.collect()  # model and trainer hold each other: the next run would count this one's weights
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    if args.out:
        args.out.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
