"""Every recipe parses, and `rope-patch train` runs with the settings of each on a tiny model."""

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml
from support.tiny import tiny
from support.training import tokenizer
from transformers import AutoModelForCausalLM

from rope_patch import load_adapter
from rope_patch.views import VIEWS
from trl_ext import cli
from trl_ext.recipes.recipe import recipe_and_flags
from trl_ext.recipes.stages import read_stages

EXAMPLES = Path(__file__).parents[2] / "examples"
RECIPES = sorted([*(EXAMPLES / "recipes").rglob("*.yaml"), *(EXAMPLES / "papers").rglob("*.yaml")])
RECIPES = [recipe for recipe in RECIPES if recipe.stem != "reproduce"]

ON_CPU = ["--use_cpu", "true", "--bf16", "false"]

# max_position_embeddings of the models' configs
WINDOWS = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": 8192,
    "Qwen/Qwen3-0.6B": 40960,
    "Qwen/Qwen3-4B": 40960,
    "google/gemma-3-270m": 32768,
    "meta-llama/Llama-2-7b-hf": 4096,
    "meta-llama/Llama-3.2-1B": 131072,
    "meta-llama/Meta-Llama-3-8B": 8192,
    "meta-llama/Meta-Llama-3-8B-Instruct": 8192,
    "posaug-10m": 2048,  # which random_weights.py writes
}
OF_THE_PAPER = {"llama32_1b_posaug_32k": 2048}  # another window that a comment names


def name_of(recipe):
    return recipe.relative_to(EXAMPLES).with_suffix("").as_posix()


def reach(settings):
    """The positions that training reads."""
    view = settings.get("view_args") or {}
    if settings.get("view") == "posaug":
        return round(settings["max_length"] * view["alpha"]["high"])
    if settings.get("view") == "pose":
        return view["target"]  # rows are cut to windows
    return max(view.get("target", 0), settings["max_length"] + view.get("skip", {}).get("high", 0))


@pytest.mark.parametrize("recipe", RECIPES, ids=name_of)
def test_a_recipe_rescales_as_far_as_it_reads_and_names_the_window_of_its_model(recipe):
    settings = yaml.safe_load(recipe.read_text())
    window, options = WINDOWS[settings["model_name_or_path"]], settings.get("rescale_args") or {}
    promised = options.get("max_position_embeddings", round(window * options.get("factor", 1)))
    if settings["model_name_or_path"] == "posaug-10m":
        promised *= 8  # a model from random weights has no window yet: the paper's factors reach so far
    if settings.get("rescale") == "abf":
        promised = max(promised, settings["max_length"])  # the trainer promises the rows that it is given
    read = max(reach({**settings, **stage}) for stage in settings.get("stages", [{}]))
    assert read <= promised, f"positions up to {read} in a window of {promised}"
    head = " ".join(line.removeprefix("#") for line in recipe.read_text().splitlines() if line.startswith("#"))
    named = {int(n) for n in re.findall(r"(\d{4,6}) positions", head)}
    assert named <= {window, read, OF_THE_PAPER.get(recipe.stem)}, f"the comment names {named}"


@pytest.mark.parametrize("recipe", RECIPES, ids=name_of)
def test_weights_that_a_recipe_trains_are_float32(recipe):
    settings = yaml.safe_load(recipe.read_text())
    if not settings.get("use_peft") or settings.get("lora_modules_to_save"):
        assert settings.get("dtype", "float32") == "float32"


def test_there_is_a_recipe_with_the_authors_adapters_and_one_with_the_papers_weights():
    """And all have the settings of the paper's two stages, but for rates and weights that are ours."""
    papers = [
        read_stages(yaml.safe_load(path.read_text()), ON_CPU)
        for path in RECIPES
        if path.parent.name in ("restore", "linearard")
    ]
    adapters = [
        (s[0].model.lora_r, s[0].model.lora_alpha, s[0].model.lora_dropout) for s in papers if s[0].model.use_peft
    ]
    assert adapters and set(adapters) == {(1024, 2048, 0.05)}
    assert any({stage.training.trainable for stage in stages} == {"qkv"} for stages in papers)
    for stages in papers:
        steps = [(stage.name, stage.training.max_steps, stage.training.objective) for stage in stages]
        assert steps[0][:2] == ("distil", 144) and steps[1:] in ([], [("extend", 16, "clm")])
        assert stages[0].training.max_length in (1024, 4096)
        assert {stage.training.max_length for stage in stages[1:]} <= {32768}
        for stage in stages:
            training = stage.training
            rows = training.per_device_train_batch_size * training.gradient_accumulation_steps
            assert training.long_documents == "full-rows" and rows == 4
            assert (training.weight_decay, training.warmup_steps, training.max_grad_norm) == (0.01, 4, 5.0)
            assert training.lr_scheduler_kwargs == {"min_lr_rate": 0.9}


@pytest.mark.parametrize("recipe", RECIPES, ids=name_of)
def test_a_recipe_holds_only_known_keys_and_says_how_to_run_it(recipe):
    settings = yaml.safe_load(recipe.read_text())
    stages = read_stages(settings, ON_CPU, str(recipe))
    assert len(stages) == len(settings.get("stages", [{}]))
    assert stages[0].model.model_name_or_path == settings["model_name_or_path"]
    named = recipe.relative_to(EXAMPLES.parent).as_posix()
    assert recipe.read_text().startswith("# ") and f" train {named}\n" in recipe.read_text()


@pytest.mark.parametrize("recipe", RECIPES, ids=name_of)
def test_a_recipe_takes_another_model_and_another_text_by_two_flags(recipe):
    keys, flags, source = recipe_and_flags([str(recipe), "--model", "mine", "--data", "a.jsonl", "b.jsonl.xz"])
    stages = read_stages(keys, [*flags, *ON_CPU], source)
    texts = [text for stage in stages for text in stage.data.datasets]
    settings = yaml.safe_load(recipe.read_text())
    mine = {"path": "json", "data_files": ["a.jsonl", "b.jsonl.xz"]}
    wanted = [stage["datasets"][0] if "datasets" in stage else mine for stage in settings.get("stages", [{}])]
    assert [(text.path, text.data_files) for text in texts] == [(w["path"], w.get("data_files")) for w in wanted]
    assert {stage.model.model_name_or_path for stage in stages} == {"mine"}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES, ids=name_of)
def test_the_command_runs_a_recipe(recipe, tmp_path, monkeypatch, capsys):
    settings = yaml.safe_load(recipe.read_text())
    window = WINDOWS[settings["model_name_or_path"]]  # so that targets lie within it
    tiny(max_position_embeddings=window).save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    rows = [{"text": " ".join(f"w{3 + (i * j) % 97}" for j in range(40))} for i in range(1, 30)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "books.jsonl").write_text("\n".join(map(json.dumps, [{"text": f"{row['text']} " * 5} for row in rows])))
    chats = [{"prompt": row["text"], "completion": "w5 w6"} for row in rows]  # the tokenizer has no chat template
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    rows = [{"input_ids": [*range(3, 43)], "completion_mask": [0] * 30 + [1] * 10}] * 8  # as `rope-patch rows` writes
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings.update(
        output_dir=str(tmp_path / "out"),
        dtype="float32",
        gradient_accumulation_steps=1,
        save_steps=2,
        report_to="none",
        use_cpu=True,
        bf16=False,
    )
    for stage in settings.get("stages", [settings]):
        stage |= {"max_steps": 2, "max_length": 64}
        if "datasets" in stage and stage is not settings:
            own = "chats.jsonl" if stage["name"] == "sft" else "books.jsonl"
            stage["datasets"] = [{"path": "json", "data_files": own}]
        for of_template in ("chat_template_path", "assistant_only_loss"):
            stage.pop(of_template, None)
    longce = (settings.get("objective_args") or {}).get("kl_longce")
    if longce is not None:
        longce |= {"short_context": 16, "stride": 8}  # documents have 40 tokens here
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(settings))
    monkeypatch.chdir(tmp_path)
    text = settings["datasets"][0].get("data_files", "books.jsonl")  # or a data set on the hub
    shutil.copy(text if Path(text).is_file() else "train.jsonl", "mine.jsonl")
    assert cli.main(["train", "recipe.yaml", "--model", "model", "--data", "mine.jsonl"]) == 0
    printed = capsys.readouterr().out
    for stage in settings.get("stages", [settings]):
        assert f"{VIEWS[stage.get('view', 'standard')].__name__}(" in printed
    if "stages" in settings:
        assert f"{tmp_path / 'out' / 'model'}: " in printed
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model")
        rope = plain.config.rope_parameters
        assert settings["rescale_args"] in ({"factor": rope.get("factor")}, {"theta": rope["rope_theta"]})
    elif settings.get("use_peft"):
        load_adapter(tiny(max_position_embeddings=window), tmp_path / "out")
