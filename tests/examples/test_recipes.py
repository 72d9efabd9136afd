"""Every recipe parses, and `rope-patch train` runs with the settings of each on a tiny model."""

import json
import re
from pathlib import Path

import pytest
import yaml
from support.tiny import tiny
from support.training import tokenizer
from transformers import AutoModelForCausalLM

from rope_patch import load_adapter
from rope_patch.views import VIEWS
from trl_ext import RecipeParser, cli
from trl_ext.cli.train import is_restoration
from trl_ext.recipes.fine_tuning import FIELDS
from trl_ext.recipes.restoration import DISTIL, EXTEND
from trl_ext.recipes.restoring import FIELDS as RESTORE_FIELDS

EXAMPLES = Path(__file__).parents[2] / "examples"
RECIPES = sorted((EXAMPLES / "recipes").glob("*.yaml"))
RESTORE_RECIPES = sorted((EXAMPLES / "recipes" / "restore").glob("*.yaml"))

# max_position_embeddings of the models' configs
WINDOWS = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": 8192,
    "Qwen/Qwen3-0.6B": 40960,
    "Qwen/Qwen3-4B": 40960,
    "google/gemma-3-270m": 32768,
    "meta-llama/Llama-2-7b-hf": 4096,
    "meta-llama/Llama-3.2-1B": 131072,
    "meta-llama/Meta-Llama-3-8B": 8192,
}
OF_THE_PAPER = {"llama32_1b_posaug_32k": 2048}  # another window that a comment names


@pytest.mark.parametrize("recipe", [*RECIPES, *RESTORE_RECIPES], ids=lambda r: r.stem)
def test_a_recipe_rescales_as_far_as_it_reads_and_names_the_window_of_its_model(recipe):
    settings = yaml.safe_load(recipe.read_text())
    window, options = WINDOWS[settings["model_name_or_path"]], settings.get("rescale_args") or {}
    promised = options.get("max_position_embeddings", round(window * options.get("factor", 1)))
    if settings.get("rescale") == "abf":
        promised = max(promised, settings["max_length"])  # the trainer promises the rows that it is given
    view = settings.get("view_args") or {}
    if recipe.parent.name == "restore":
        distil = {"max_length": DISTIL["max_length"], **settings.get("distil", {})}
        read = 0 if settings.get("skip_extension") else EXTEND["max_length"]
        assert distil["max_length"] <= window, "the teacher's"
    else:
        read = max(view.get("target", 0), settings["max_length"] + view.get("skip", {}).get("high", 0))
        if settings["view"] == "posaug":
            read = round(settings["max_length"] * view["alpha"]["high"])
        elif settings["view"] == "pose":
            read = view["target"]  # rows are cut to windows
    assert read <= promised, f"positions up to {read} in a window of {promised}"
    head = " ".join(line.removeprefix("#") for line in recipe.read_text().splitlines() if line.startswith("#"))
    named = {int(n) for n in re.findall(r"(\d{4,6}) positions", head)}
    assert named <= {window, read, OF_THE_PAPER.get(recipe.stem)}, f"the comment names {named}"


@pytest.mark.parametrize("recipe", [*RECIPES, *RESTORE_RECIPES], ids=lambda r: r.stem)
def test_weights_that_a_recipe_trains_are_float32(recipe):
    settings = yaml.safe_load(recipe.read_text())
    default = None if recipe.parent.name == "restore" else "float32"  # of a restoration, of TRL
    if not settings.get("use_peft") or settings.get("lora_modules_to_save"):
        assert settings.get("dtype", default) in (None, "float32")


def test_there_is_a_recipe_with_the_authors_adapters_and_one_with_the_papers_weights():
    settings = [yaml.safe_load(recipe.read_text()) for recipe in RESTORE_RECIPES]
    adapters = [(r["lora_r"], r["lora_alpha"], r["lora_dropout"]) for r in settings if r.get("use_peft")]
    assert adapters and set(adapters) == {(1024, 2048, 0.05)}
    assert any(not r.get("use_peft") and "trainable" not in str(r) for r in settings)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.stem)
def test_a_recipe_holds_only_known_keys_and_says_how_to_run_it(recipe):
    arguments = ["--config", str(recipe)]
    assert not is_restoration(arguments)
    _, training, model, _ = RecipeParser(FIELDS).parse_args_and_config([*arguments, "--use_cpu", "--bf16", "false"])
    settings = yaml.safe_load(recipe.read_text())
    assert training.view == settings["view"] and model.model_name_or_path == settings["model_name_or_path"]
    assert recipe.read_text().startswith("# ") and f" train examples/recipes/{recipe.name}\n" in recipe.read_text()


@pytest.mark.parametrize("recipe", RESTORE_RECIPES, ids=lambda r: r.stem)
def test_a_recipe_of_a_restoration_is_known_by_its_keys_and_says_how_to_run_it(recipe):
    arguments = ["--config", str(recipe)]
    assert is_restoration(arguments)
    restoration, model = RecipeParser(RESTORE_FIELDS).parse_args_and_config(arguments)
    settings = yaml.safe_load(recipe.read_text())
    assert restoration.rescale == settings["rescale"] and model.model_name_or_path == settings["model_name_or_path"]
    assert f" train examples/recipes/restore/{recipe.name}\n" in recipe.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.stem)
def test_the_command_runs_a_recipe(recipe, tmp_path, monkeypatch, capsys):
    settings = yaml.safe_load(recipe.read_text())
    window = WINDOWS[settings["model_name_or_path"]]  # so that targets lie within it
    tiny(max_position_embeddings=window).save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    rows = [{"text": " ".join(f"w{3 + (i * j) % 97}" for j in range(40))} for i in range(1, 30)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    rows = [{"input_ids": [*range(3, 43)], "completion_mask": [0] * 30 + [1] * 10}] * 8  # as `rope-patch rows` writes
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings.update(
        model_name_or_path=str(tmp_path / "model"),
        output_dir=str(tmp_path / "out"),
        dtype="float32",
        max_steps=2,
        max_length=64,
        gradient_accumulation_steps=1,
        save_steps=2,
        report_to="none",
        use_cpu=True,
        bf16=False,
    )
    longce = (settings.get("objective_args") or {}).get("kl_longce")
    if longce is not None:
        longce |= {"short_context": 16, "stride": 8}  # documents have 40 tokens here
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(settings))
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", "recipe.yaml"]) == 0
    assert f"{VIEWS[settings['view']].__name__}(" in capsys.readouterr().out
    if settings.get("use_peft"):
        load_adapter(tiny(max_position_embeddings=window), tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RESTORE_RECIPES, ids=lambda r: r.stem)
def test_the_command_runs_a_recipe_of_a_restoration(recipe, tmp_path, monkeypatch, capsys):
    tiny("qwen3" if "qwen3" in recipe.name else "llama").save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    rows = [{"text": " ".join(f"w{3 + (i * j) % 97}" for j in range(200))} for i in range(1, 9)]
    (tmp_path / "books.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = yaml.safe_load(recipe.read_text())
    short = {"max_steps": 2, "max_length": 64, "use_cpu": True, "bf16": False, "report_to": "none"}
    settings.update(
        model_name_or_path=str(tmp_path / "model"),
        output_dir=str(tmp_path / "out"),
        distil={**settings.get("distil", {}), **short},
        extend={**settings.get("extend", {}), **short, "max_length": 128},
    )
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(settings))
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", "recipe.yaml"]) == 0
    assert f"{tmp_path / 'out' / 'model'}: " in capsys.readouterr().out
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model")
    assert plain.config.rope_parameters["factor"] == settings["rescale_args"]["factor"]
