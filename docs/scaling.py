"""Write the tables of docs/scaling.md: hours and memory of whole recipes, by arithmetic. Run: python docs/scaling.py"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import mean
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "benchmarks")]

from distillation_step import SHAPES  # noqa: E402

from trl_ext import RopeSFTConfig  # noqa: E402
from trl_ext.engines.sharding import Sharding  # noqa: E402
from trl_ext.extension.choices import choose  # noqa: E402
from trl_ext.extension.facts import ModelFacts  # noqa: E402
from trl_ext.extension.machine import Machine  # noqa: E402
from trl_ext.extension.options import ExtendOptions  # noqa: E402
from trl_ext.extension.plan import ExtensionPlan  # noqa: E402
from trl_ext.memory.plan import GIB, plan_memory  # noqa: E402
from trl_ext.recipes.engine_advice import model_on_meta  # noqa: E402

PAGE = ROOT / "docs" / "scaling.md"
RESULTS = ("distillation-step-h200.json", "self-distill-step-h200.json")
NAMES = {"llama-3-8b": "Llama-3-8B", "qwen3-4b": "Qwen3-4B"}
GPU_GIB = 80
HOUR = 3600
TARGET = 1 << 20
SECTIONS = ("steps", "recipes", "window", "extend")
MEMORY = "GiB: GPU / GPU, offloading / its host then"


@dataclass(frozen=True)
class Recipe:
    """What a paper trains, as far as it reports it.

    Args:
        paper: and the part of its recipe.
        shape: of the model.
        objective: as in the measured runs.
        row: tokens of a row.
        tokens: in all.
        all_weights: whether all are trained, or adapters.
        hardware: the paper's.
    """

    paper: str
    shape: str
    objective: str
    row: int
    tokens: float
    all_weights: bool
    hardware: str


RECIPES = (
    Recipe("RPSD, Llama-3-8B to 64K", "llama-3-8b", "self-distill", 65536, 4e9, True, "16 A100"),
    Recipe("RPSD, Qwen3-4B to 256K", "qwen3-4b", "self-distill", 262144, 8e9, True, "32 A100"),
    Recipe("LinearARD, stage 1", "llama-3-8b", "relation-distill", 4096, 2_359_296, False, "2 GPUs"),
    Recipe("LinearARD, stage 2", "llama-3-8b", "clm", 32768, 2**21, False, "-"),
    Recipe("EndPrompt", "llama-3-8b", "clm", 8192, 1e9, True, "8 A800"),
)


def config_of(shape: str) -> PreTrainedConfig:
    """Config of a measured shape."""
    return AutoConfig.for_model(**{"model_type": "llama", **SHAPES[shape]})


def flops_per_token(config: Any, row: int, *, all_weights: bool) -> float:
    """Multiplications and additions that a next-token step takes for each token of a row of n, with checkpointing.

    With P weights in matrices of layers, D of them in the last of each layer, which is not computed again, V H in the
    head, L layers, A channels of all query heads, and b = 4 passes over matrices where all weights are trained
    (forward, its recompute, gradients of inputs, gradients of weights), 3 under adapters, whose own matrices are left
    out:

        2 (b (P + V H) - D) + 4.5 * 2 L A n

    A causal forward of attention takes 2 A n a layer and token; it runs twice, and its backward takes 5/2 of it.
    """
    hidden, heads = config.hidden_size, config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    queries, keys = heads * head_dim, config.num_key_value_heads * head_dim
    last = hidden * config.intermediate_size
    layer = hidden * (2 * queries + 2 * keys) + 3 * last
    layers = config.num_hidden_layers
    passes = 4 if all_weights else 3
    of_matrices = 2 * (passes * (layers * layer + config.vocab_size * hidden) - layers * last)
    return of_matrices + 4.5 * 2 * layers * queries * row


def measured_runs() -> list[dict[str, Any]]:
    """Runs of research/results with a rate, without 4-bit weights; of one that was run twice, the last."""
    runs = [run for name in RESULTS for run in json.loads((ROOT / "research" / "results" / name).read_text())["runs"]]
    plain = [run for run in runs if "tokens_per_second" in run and not run.get("nf4")]
    return list({(run["shape"], run["length"], run["run"]): run for run in plain}.values())


def _rate(runs: Sequence[dict[str, Any]], shape: str, length: int, run: str) -> float | None:
    rates = {(of["shape"], of["length"], of["run"]): float(of["tokens_per_second"]) for of in runs}
    return rates.get((shape, length, run))


def achieved(run: dict[str, Any]) -> float:
    """Operations a second of a measured next-token step."""
    flops = flops_per_token(config_of(run["shape"]), run["length"], all_weights=run["lora_rank"] == 0)
    return flops * float(run["tokens_per_second"])


def speed(runs: Sequence[dict[str, Any]]) -> float:
    """Mean operations a second of the next-token steps."""
    return mean(achieved(run) for run in runs if run["run"] == "clm")


def cost(runs: Sequence[dict[str, Any]], objective: str) -> float:
    """Mean time of a step of an objective over that of a next-token step of the same shape and length."""
    ratios = []
    for run in runs:
        of_clm = _rate(runs, run["shape"], run["length"], "clm")
        if run["run"] == objective and of_clm is not None:
            ratios.append(of_clm / float(run["tokens_per_second"]))
    return mean(ratios)


def predicted(runs: Sequence[dict[str, Any]], shape: str, row: int, objective: str, *, all_weights: bool) -> float:
    """Tokens a second of one H200, by arithmetic."""
    flops = flops_per_token(config_of(shape), row, all_weights=all_weights)
    return speed(runs) / flops / cost(runs, objective)


def step_table(runs: Sequence[dict[str, Any]]) -> str:
    """Measured next-token and self-distillation steps beside the arithmetic."""
    rows = ["| | tokens a row | measured tokens/s | by arithmetic | difference |", "|---|---|---|---|---|"]
    for run in sorted(runs, key=lambda of: (of["shape"], of["run"], of["length"])):
        if run["run"] in ("clm", "self-distill", "relation-distill"):
            of = predicted(runs, run["shape"], run["length"], run["run"], all_weights=run["lora_rank"] == 0)
            rate = run["tokens_per_second"]
            name = f"{NAMES[run['shape']]}, {'LoRA' if run['lora_rank'] else 'all weights'}, `{run['run']}`"
            rows.append(f"| {name} | {run['length']} | {rate:.0f} | {of:.0f} | {100 * (of / rate - 1):+.0f} % |")
    longest = _longest_step()
    of = predicted(runs, "qwen3-4b", longest["length"], "self-distill sequential", all_weights=True)
    rate = longest["length"] / longest["seconds_of_one_step"]
    rows.append(
        f"| Qwen3-4B, all weights, `self-distill`, one view after the other | {longest['length']} | {rate:.0f} | "
        f"{of:.0f} | {100 * (of / rate - 1):+.0f} % |"
    )
    return "\n".join(rows) + "\n"


def _longest_step() -> dict[str, Any]:
    """The single step of 262144 tokens, from which nothing of the arithmetic is taken."""
    runs = json.loads((ROOT / "research" / "results" / RESULTS[1]).read_text())["runs"]
    (run,) = [run for run in runs if "seconds_of_one_step" in run]
    return dict(run)


def recipe_table(runs: Sequence[dict[str, Any]]) -> str:
    """GPU hours of each paper's recipe, and memory of its rows on eight GPUs."""
    heads = ("", "tokens", "tokens a row", "trained", "GPU hours", "hours on 8 / 32 GPUs", MEMORY, "the paper's GPUs")
    rows = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for recipe in RECIPES:
        rate = predicted(runs, recipe.shape, recipe.row, recipe.objective, all_weights=recipe.all_weights)
        hours = recipe.tokens / rate / HOUR
        memory = memory_on(recipe.shape, recipe.row, recipe.objective, 8, all_weights=recipe.all_weights, shared=False)
        trained = "all weights" if recipe.all_weights else "LoRA"
        rows.append(
            f"| {recipe.paper} | {_tokens(recipe.tokens)} | {recipe.row} | {trained} | "
            f"{_few(hours)} | {_few(hours / 8)} / {_few(hours / 32)} | {memory} | {recipe.hardware} |"
        )
    return "\n".join(rows) + "\n"


def window_table(runs: Sequence[dict[str, Any]]) -> str:
    """A window of 2^20 tokens of Llama-3-8B, on 8 to 64 GPUs."""
    heads = ["GPUs"]
    for objective in ("next-token", "self-distillation"):
        heads += [f"{objective}: minutes a row", MEMORY]
    rows = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for n_gpus in (8, 16, 32, 64):
        cells = []
        for objective in ("clm", "self-distill"):
            rate = predicted(runs, "llama-3-8b", TARGET, objective, all_weights=True) * n_gpus
            cells.append(_few(TARGET / rate / 60))
            cells.append(memory_on("llama-3-8b", TARGET, objective, n_gpus, all_weights=True, shared=True))
        rows.append(f"| {n_gpus} | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def _few(number: float) -> str:
    """With two digits that count."""
    return f"{float(f'{number:.2g}'):,g}"


def _tokens(number: float) -> str:
    return f"{number / 1e9:g} billion" if number >= 1e9 else f"{number / 1e6:.2f} million"


def memory_on(shape: str, row: int, objective: str, n_gpus: int, *, all_weights: bool, shared: bool) -> str:
    """GiB on each GPU with weights in parts and layers in tiles, then with checkpoints on the host, and GiB there.

    Args:
        shape: of the model.
        row: tokens.
        objective: name of `RopeSFTConfig`.
        n_gpus: GPUs in all.
        all_weights: whether all are trained, in float32, or a LoRA of 64 over weights of 16 bits.
        shared: whether all GPUs share a row.
    """
    model = _on_meta(shape, all_weights)
    view = {} if objective == "clm" else {"view": "skip"}
    if objective == "relation-distill":
        view = {"rescale": "yarn", "rescale_args": {"factor": 4.0}}
    training = RopeSFTConfig(
        output_dir="unused", objective=objective, bf16=True, use_cpu=True, per_device_train_batch_size=1, **view
    )
    sharding = Sharding.of_config("fsdp2-cp" if shared else "fsdp2", n_gpus)
    plan = plan_memory(model, training, row, torch.device("cpu"), "on", sharding)
    device = plan.memory.fixed + plan.memory_when_on.at_once
    sizes = (device + plan.memory.checkpoints, device, plan.memory.checkpoints)
    return " / ".join(f"{size / GIB:.0f}" for size in sizes)


@cache
def _on_meta(shape: str, all_weights: bool) -> Any:
    if all_weights:
        return model_on_meta(config_of(shape), None, torch.float32)
    from peft import LoraConfig

    adapters = LoraConfig(r=64, target_modules=["q_proj", "k_proj", "v_proj"])
    return model_on_meta(config_of(shape), adapters, torch.bfloat16)


def extended_model(name: str) -> ModelFacts:
    """The facts of a model that `extend` plans for, from its config alone."""
    chats = SimpleNamespace(chat_template="of its own")
    config = config_of(name.lower())
    return ModelFacts(name, config, chats, config.max_position_embeddings, torch.bfloat16)


def extension_plan(facts: ModelFacts, gib: float, n_gpus: int, **options: Any) -> ExtensionPlan:
    """The plan of `rope-patch extend MODEL --to 131072 --dry-run --device-memory GIB --devices N`."""
    given = ExtendOptions(model=facts.name, to=1 << 17, data=("books.jsonl",), output="out", device="cuda", **options)
    machine = Machine.elsewhere(gib, n_gpus)
    return ExtensionPlan.of(facts, given, choose(facts, given, machine), machine, "the data")


def extend_table() -> str:
    """Memory and time of extending two models to 131072 positions, on one GPU and on eight."""
    heads = ("", "trained", "GPUs", "engine", "GiB on each", "minutes of training", "hours in all", "measured")
    rows = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name in ("Llama-3-8B", "Qwen3-8B"):
        facts = extended_model(name)
        for given, gpus in (({}, (1, 8)), ({"train": "qlora"}, (1,)), ({"train": "all"}, (1, 8))):
            for n_gpus in gpus:
                plan = extension_plan(facts, GPU_GIB, n_gpus, **given)
                weights = plan.choices.weights.value
                named = {"all": "all weights", "qlora": "QLoRA", "lora": "LoRA, which is chosen"}
                trained = named[weights["train"]]
                trained += ", checkpointed" * weights["gradient_checkpointing"]
                engine = "-" if plan.engine is None else f"`{plan.engine.config}`"
                held = (plan.memory.total if plan.engine is None else plan.engine.bytes) / GIB
                time = f"{plan.minutes.train:.1f} | {plan.minutes.total / 60:.1f}" if plan.fits else "does not fit | -"
                measured = "-" if n_gpus > 1 or not plan.fits else measured_extension(name, plan)
                rows.append(f"| {name} | {trained} | {n_gpus} | {engine} | {held:.0f} | {time} | {measured} |")
    return "\n".join(rows) + "\n"


def measured_extension(name: str, plan: ExtensionPlan) -> str:
    """GiB of measured steps as a plan has them, and minutes of as many rows."""
    file = ROOT / "research" / "results" / "extension-memory-h200.json"
    rows, weights = plan.choices.rows.value, plan.choices.weights.value
    wanted = (name.lower(), rows["length"], weights["train"], weights["gradient_checkpointing"], "native-distill")
    keys = ("shape", "length", "train", "checkpointing", "objective")
    (run,) = (run for run in json.loads(file.read_text())["runs"] if tuple(run[key] for key in keys) == wanted)
    return f"{run['peak_gib']:.0f} GiB, {rows['n'] * run['seconds_a_row'] / 60:.1f} minutes"


def tables() -> dict[str, str]:
    """Section -> its table."""
    runs = measured_runs()
    made = (step_table(runs), recipe_table(runs), window_table(runs), extend_table())
    return dict(zip(SECTIONS, made, strict=True))


def with_tables(page: str) -> str:
    """A page with its tables rewritten, each between two comments."""
    for section, table in tables().items():
        start, end = f"<!-- {section}: written by docs/scaling.py -->\n", f"<!-- end of {section} -->"
        before, _, rest = page.partition(start)
        page = before + start + table + end + rest.partition(end)[2]
    return page


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
