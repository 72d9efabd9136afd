"""Folders of the four papers: their commands, the settings of their recipes, memory, and figures on their pages."""

import json
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
import torch
import yaml
from distillation_step import SHAPES
from support.pages import RESULTS, ROOT
from support.training import tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from trl_ext.cli.console import _parser
from trl_ext.cli.model_spec import ModelSpec
from trl_ext.cli.reproduce import with_paths
from trl_ext.engines.sharding import Sharding
from trl_ext.memory.plan import GIB, plan_memory
from trl_ext.recipes.adapter_config import adapter_config
from trl_ext.recipes.engine_advice import model_on_meta
from trl_ext.recipes.launching import Launch
from trl_ext.recipes.recipe import recipe_and_flags, with_config_flag
from trl_ext.recipes.stages import read_stages
from trl_ext.trainer.model_setup import train_qkv_only

PAPERS = ROOT / "examples" / "papers"
NAMES = ["endprompt", "linearard", "posaug", "rpsd"]
SIZES = [(name, size) for name in NAMES for size in ("small", "full")]
ON_CPU = ["--use_cpu", "true", "--bf16", "false"]
WEIGHTS = runpy.run_path(str(PAPERS / "posaug" / "random_weights.py"))
QWEN3_06B = {
    **SHAPES["qwen3-4b"],
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
}
CONFIGS = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": SHAPES["smollm2-135m"],
    "Qwen/Qwen3-0.6B": QWEN3_06B,
    "Qwen/Qwen3-4B": SHAPES["qwen3-4b"],
    "meta-llama/Meta-Llama-3-8B": SHAPES["llama-3-8b"],
    "meta-llama/Meta-Llama-3-8B-Instruct": SHAPES["llama-3-8b"],
    "out/SmolLM2-135M-Instruct": SHAPES["smollm2-135m"],
}


def size_of(name, size):
    return yaml.safe_load((PAPERS / name / "reproduce.yaml").read_text())[size]


def commands_of(name, size):
    return [shlex.split(c) for c in with_paths(size_of(name, size)["commands"], PAPERS / name, Path("out"))]


def stages_of(words):
    """The stages that `rope-patch train ...` reads."""
    _, arguments = Launch.take(_parser().parse_args(words).arguments)
    keys, flags, source = recipe_and_flags(with_config_flag(arguments))
    return read_stages(keys, [*flags, *ON_CPU], source)


def trainings(name, size):
    return [stages_of(words) for _, *words in commands_of(name, size) if words[0] == "train"]


def test_each_paper_has_its_page_its_recipes_and_its_commands():
    assert sorted(folder.name for folder in PAPERS.iterdir()) == NAMES
    for name in NAMES:
        needed = {"README.md", "full.yaml", "small.yaml", "reproduce.yaml"}
        assert needed <= {file.name for file in (PAPERS / name).iterdir()}
        assert f"rope-patch reproduce {name}\n" in (PAPERS / name / "README.md").read_text()


@pytest.mark.parametrize(("name", "size"), SIZES)
def test_commands_are_right_and_measure_what_they_trained(name, size):
    made = set()
    for program, *words in commands_of(name, size):
        if program == "python":
            made.add(words[words.index("--output") + 1])
            continue
        known = _parser().parse_args(words)
        if known.command == "train":
            stages = stages_of(words)
            start = str(stages[0].model.model_name_or_path)
            assert start in made or not start.startswith("out/") or start == "out/SmolLM2-135M-Instruct"
            of_stages = [str(stage.folder) for stage in stages]
            made.update(of_stages, [f"{stages[0].folder.parent}/model"] if stages[0].name else [])
        elif known.command == "eval":
            assert str(known.output_dir) == "out/report"
            specs = {spec.label: spec for spec in map(ModelSpec.parse, known.model)}
            trained = {spec.path for spec in specs.values() if spec.path.startswith("out/")}
            assert trained <= made | {"out/SmolLM2-135M-Instruct"}
    for claim in size_of(name, size)["figures"]:
        assert set(claim) == {"claim", "paper", "figure", "models"} and set(claim["models"]) <= specs.keys()
        at = re.search(r"at (\d+)", claim["figure"])
        assert at is None or int(at[1]) in known.lengths


def test_rpsd_has_the_settings_of_its_paper():
    (skip, chats), (control, _) = trainings("rpsd", "full")
    (qwen,) = read_stages(yaml.safe_load((PAPERS / "rpsd" / "qwen3_4b.yaml").read_text()), ON_CPU)
    for stage, rows, length, theta, rate in ((skip, 64, 65536, 8e6, 1e-5), (qwen, 32, 262144, 1e7, 5e-6)):
        training = stage.training
        assert 8 * training.per_device_train_batch_size * training.gradient_accumulation_steps == rows
        assert (training.max_length, training.max_steps, training.learning_rate) == (length, 1000, rate)
        assert training.rescale_args == {"theta": theta} and not stage.model.use_peft
        assert (training.adam_beta1, training.adam_beta2) == (0.9, 0.95)
        assert (training.weight_decay, training.max_grad_norm, training.warmup_steps) == (0.1, 1.0, 100)
        assert training.lr_scheduler_kwargs == {"min_lr_rate": 0.1}
        assert (training.objective, training.view) == ("self-distill", "skip")
    assert (control.training.objective, control.training.view) == ("clm", "standard")
    assert chats.training.num_train_epochs == 1 and chats.data.datasets[0].path == "allenai/tulu-3-sft-mixture"


def test_linear_ard_reads_two_sets_of_text():
    ((distil, extend),) = trainings("linearard", "full")
    assert [stage.data.datasets[0].path for stage in (distil, extend)] == ["emozilla/pg19", "DKYoon/SlimPajama-6B"]
    tokens = [
        s.training.max_steps * s.training.gradient_accumulation_steps * s.training.max_length for s in (distil, extend)
    ]
    assert tokens == [2_359_296, 2**21]  # the paper's 4.25M, counted in 2^20


def test_end_prompt_trains_all_weights_under_pi_on_a_billion_tokens():
    (cue,), (full,) = trainings("endprompt", "full")
    tokens = [
        8 * s.training.per_device_train_batch_size * s.training.gradient_accumulation_steps * s.training.max_length
        for s in (cue, full)
    ]
    assert tokens == [64 * 8192] * 2 and abs(tokens[0] * cue.training.max_steps / 1e9 - 1) < 0.001
    for stage in (cue, full):
        training = stage.training
        assert (training.rescale, training.rescale_args) == ("pi", {"factor": 8.0}) and not stage.model.use_peft
        assert (training.learning_rate, training.warmup_steps, training.weight_decay) == (2e-5, 20, 0.0)
        assert training.lr_scheduler_type == "constant_with_warmup"
    assert (cue.training.view, cue.training.cue) == ("endprompt", "sentence")
    assert full.training.cue == "none" and full.training.max_length == full.training.view_args["target"]  # no gap


# rate, warmup, steps, rows a step and tokens of the paper's table 16
TABLE_16 = {
    "10m": (6e-4, 500, 1907, 128, 500e6),
    "42m": (6e-4, 1000, 3242, 128, 850e6),
    "113m": (3e-4, 1000, 8773, 128, 2.3e9),
    "425m": (2e-4, 500, 7629, 32, 500e6),
    "1b": (2e-4, 500, 7629, 32, 500e6),
}
PARAMETERS = {"10m": 10.6e6, "42m": 42.5e6, "113m": 113e6, "425m": 425e6, "1b": 1.08e9}  # without embeddings


def test_posaug_trains_five_sizes_with_and_without_its_view():
    by_size = {}
    for (stage,) in trainings("posaug", "full"):
        by_size.setdefault(Path(stage.model.model_name_or_path).name, []).append(stage.training)
    assert list(by_size) == list(TABLE_16)
    for size, (rate, warmup, steps, rows, tokens) in TABLE_16.items():
        assert [training.view for training in by_size[size]] == ["posaug", "standard"]
        for training in by_size[size]:
            assert (training.learning_rate, training.warmup_steps, training.max_steps) == (rate, warmup, steps)
            assert training.per_device_train_batch_size * training.gradient_accumulation_steps == rows
            assert training.max_length == 2048 and abs(rows * 2048 * steps / tokens - 1) < 0.01
            assert (training.packing, training.packing_strategy) == (True, "wrapped")
            assert (training.adam_beta1, training.adam_beta2, training.weight_decay) == (0.9, 0.95, 0.1)


@pytest.mark.parametrize("size", TABLE_16)
def test_posaugs_models_have_the_parameters_that_the_paper_counts(size):
    model = model_on_meta(WEIGHTS["config"](size, 50257), None, torch.float32)
    inner = sum(p.numel() for name, p in model.named_parameters() if "embed" not in name and "lm_head" not in name)
    assert abs(inner / PARAMETERS[size] - 1) < 0.01


def test_random_weights_are_drawn_by_the_seed(tmp_path, monkeypatch):
    tokenizer().save_pretrained(tmp_path / "tokenizer")
    for folder, seed in (("a", 42), ("b", 42), ("c", 137)):
        words = [
            "10m",
            "--tokenizer",
            str(tmp_path / "tokenizer"),
            "--seed",
            str(seed),
            "--output",
            str(tmp_path / folder),
        ]
        monkeypatch.setattr(sys, "argv", ["random_weights.py", *words])
        WEIGHTS["main"]()
    a, b, c = (AutoModelForCausalLM.from_pretrained(tmp_path / folder) for folder in "abc")
    weight = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(a.get_parameter(weight), b.get_parameter(weight))
    assert not torch.equal(a.get_parameter(weight), c.get_parameter(weight))
    assert a.config.vocab_size == len(AutoTokenizer.from_pretrained(tmp_path / "a"))
    assert a.config.eos_token_id == tokenizer().eos_token_id


def planned(stage, n_gpus):
    """GiB on each GPU at the peak of a step, with inputs of checkpointed layers on the host where there are eight."""
    training, name = stage.training, str(stage.model.model_name_or_path)
    training.bf16 = True
    config = AutoConfig.for_model(**{"model_type": "llama", **CONFIGS[name]}) if name in CONFIGS else None
    config = config or WEIGHTS["config"](Path(name).name, 50257)
    model = model_on_meta(config, adapter_config(stage.model), stage.loading["dtype"])
    if training.trainable == "qkv":
        train_qkv_only(model)
    sharding = Sharding.of_config("fsdp2" if n_gpus > 1 else "ddp", n_gpus)
    plan = plan_memory(model, training, training.max_length, torch.device("cpu"), "on", sharding)
    if n_gpus > 1:
        return (plan.memory.fixed + plan.memory_when_on.at_once) / GIB
    return (plan.memory_when_on.total if training.gradient_checkpointing else plan.memory.total) / GIB


@pytest.mark.parametrize(("name", "size"), SIZES)
def test_steps_of_a_paper_fit_the_gpus_that_its_recipes_name(name, size):
    """One GPU of 24 GB for the small size; of 80 GB for the full size, or eight of them."""
    for _, *words in commands_of(name, size):
        if words[0] == "train":
            n_gpus = 8 if "--accelerate-config" in words else 1
            for stage in stages_of(words):
                assert 0 < planned(stage, n_gpus) < (24 if size == "small" else 80), words


@pytest.mark.parametrize(
    ("recipe", "n_gpus", "most"),
    [("rpsd/qwen3_4b", 8, 80), ("linearard/qwen3_06b", 1, 24), ("linearard/small_lora", 1, 24)],
)
def test_steps_of_other_recipes_fit_the_gpus_that_they_name(recipe, n_gpus, most):
    for stage in read_stages(yaml.safe_load((PAPERS / f"{recipe}.yaml").read_text()), ON_CPU):
        assert 0 < planned(stage, n_gpus) < most


@pytest.mark.parametrize("name", NAMES)
def test_figures_of_a_page_are_those_of_the_results_and_of_the_plan(name):
    page = (PAPERS / name / "README.md").read_text()
    results = (RESULTS / "papers.md").read_text().splitlines()
    runs = map(json.loads, (RESULTS / "reproduce-h200.jsonl").read_text().splitlines())
    run = next(run for run in runs if run["paper"] == name)
    peak, minutes = f"{run['peak_gib']['reserved']:.0f} GiB", f"{run['seconds'] / 60:.0f} minutes"
    assert "\n".join(run["table"]) in page and {f"{minutes} and printed", f"| {peak}"} <= set(
        re.findall(r"\d+ minutes and printed|\| \d+ GiB(?=,? measured)", page)
    )
    claims = {line for line in page.splitlines() if line.count(" | ") == 4} - set(run["table"])
    assert len(claims) >= 3 and claims <= set(results)
    planned_hours = {
        line.split(" | ")[4] for line in (ROOT / "docs/scaling.md").read_text().splitlines() if " | " in line
    }
    assert set(re.findall(r"([\d.,]+) GPU hours", page)) <= planned_hours
