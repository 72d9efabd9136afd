"""`rope-patch train` of a model with Python code of its own, which the recipe allows or not."""

import json

import pytest
from support.characters import CHARACTERS, character_tokenizer
from support.own_code import MODEL_TYPE, save_with_own_code

from trl_ext.recipes.fine_tuning import fine_tune_recipe, plan_recipe


@pytest.fixture
def arguments(tmp_path):
    save_with_own_code(tmp_path / "own", vocab_size=CHARACTERS)
    character_tokenizer().save_pretrained(tmp_path / "own")
    (tmp_path / "text.jsonl").write_text("\n".join([json.dumps({"text": "It was a dark night. " * 9})] * 4))
    recipe = {
        "model_name_or_path": str(tmp_path / "own"),
        "output_dir": str(tmp_path / "out"),
        "datasets": [{"path": "json", "data_files": str(tmp_path / "text.jsonl")}],
        "view": "skip",
        "view_args": {"skip": {"law": "uniform", "high": 32}},
        "max_length": 32,
        "max_steps": 1,
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    return ["--config", str(tmp_path / "recipe.yaml")]


ALLOWED = [["--trust-remote-code", "true"], ["--model-init-kwargs", '{"trust_remote_code": true}']]


def test_a_recipe_that_allows_it_trains_and_keeps_the_code(arguments, tmp_path):
    fine_tune_recipe([*arguments, *ALLOWED[1]])
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == MODEL_TYPE and (tmp_path / "out" / "modeling.py").is_file()
    card = (tmp_path / "out" / "README.md").read_text()
    assert 'AutoModelForCausalLM.from_pretrained(".", dtype="auto", trust_remote_code=True)' in card
    assert "The model comes with Python code of its own: read it" in card and "pipeline_tag: text-generation" in card
    assert "rope-patch export" not in card


def test_the_card_of_its_adapter_loads_the_base_with_its_code(arguments, tmp_path):
    adapters = ["--use-peft", "true", "--lora-target-modules", "q_proj", "v_proj"]
    fine_tune_recipe([*arguments, *ALLOWED[0], *adapters])
    card = (tmp_path / "out" / "README.md").read_text()
    assert 'base_model_name_or_path, dtype="auto", trust_remote_code=True)' in card
    assert "The base model comes with Python code of its own" in card


@pytest.mark.parametrize("allowed", ALLOWED)
def test_its_memory_is_planned(arguments, allowed):
    assert "GPU" in plan_recipe([*arguments, *allowed], [1])


@pytest.mark.parametrize("run", [fine_tune_recipe, lambda given: plan_recipe(given, [1])], ids=["train", "plan"])
def test_a_recipe_that_does_not_allow_it_is_refused(run, arguments, tmp_path):
    with pytest.raises(ValueError, match="model_name_or_path: .*own comes with Python code of its own"):
        run(arguments)
    assert not (tmp_path / "out").exists()
