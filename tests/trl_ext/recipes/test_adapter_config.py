"""The adapters of a recipe are in the modules that it names, one or several."""

import pytest
from peft import get_peft_model
from support.tiny import tiny
from trl import ModelConfig

from trl_ext.recipes.adapter_config import adapter_config
from trl_ext.recipes.recipe import RecipeParser


def adapted(lines, tmp_path):
    """Ends of names of the modules that get adapters by a recipe."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"use_peft: true\nlora_r: 2\n{lines}")
    (model,) = RecipeParser(ModelConfig).parse_args_and_config([str(recipe)])
    names = get_peft_model(tiny(), adapter_config(model)).state_dict()
    return {name.split(".lora_A")[0].rsplit(".", 1)[1] for name in names if ".lora_A" in name}


@pytest.mark.parametrize(
    ("targets", "modules"),
    [
        ("[q_proj]", {"q_proj"}),
        ("[self_attn.k_proj]", {"k_proj"}),
        ("[q_proj, v_proj]", {"q_proj", "v_proj"}),
        (r"['.*layers\.0.*\.(up|down)_proj']", {"up_proj", "down_proj"}),
        ("[all-linear]", {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}),
    ],
)
def test_the_modules_that_a_recipe_names_get_adapters(targets, modules, tmp_path):
    assert adapted(f"lora_target_modules: {targets}", tmp_path) == modules


def test_without_adapters_there_is_no_config():
    assert adapter_config(ModelConfig()) is None


def test_a_name_on_the_command_line_is_one_too():
    flags = "--use-peft true --lora-target-modules q_proj".split()
    (model,) = RecipeParser(ModelConfig).parse_args_and_config(flags)
    assert adapter_config(model).target_modules == {"q_proj"}
