"""What a recipe holds that no config takes is named with its file and what was meant, before anything else is read."""

import os
from dataclasses import dataclass, field

import pytest
from trl import DatasetMixtureConfig, ModelConfig

from trl_ext import RecipeParser, RopeSFTConfig
from trl_ext.recipes.recipe import recipe_and_flags, with_config_flag
from trl_ext.recipes.stages import FIELDS

ON_CPU = ["--use-cpu", "true", "--bf16", "false"]


@pytest.fixture
def parse(tmp_path):
    """Parses a recipe, with the flags behind it; `{file}` in an error is its path."""

    def run(recipe, *flags, kinds=FIELDS):
        file = tmp_path / "recipe.yaml"
        file.write_text(recipe)
        return RecipeParser(kinds).parse_args_and_config(["--config", str(file), *flags])

    run.file = tmp_path / "recipe.yaml"
    return run


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("vew: skip", "Unknown key 'vew' of {file}. Did you mean 'view'"),
        ("view: skip\nlearning-rate: 1.0e-5", "Unknown key 'learning-rate' of {file}. Did you mean 'learn"),
        ("view_arg: {skip: 3}", "Did you mean 'view_args' or 'view'"),
        ("zzzz: 1", "Unknown key 'zzzz' of {file}. --help-all explains each."),
        ("help: 1", "Unknown key 'help' of {file}."),
        ("on: 1", "Unknown key True of {file}."),
        (
            "datasets: [{path: json}, {path: json, data_file: train.jsonl}]",
            "Unknown key 'data_file' of `datasets` in {file}. Did you mean 'data_files'? Known: columns, data_dir",
        ),
        ("datasets: train.jsonl", "datasets in {file} must be a list of mappings"),
        ("datasets: [{data_files: train.jsonl}]", "each entry of datasets in {file} needs `path`"),
        ("max_steps: ten", "max_steps in {file} must be an integer, got 'ten'."),
        ("max_steps: 2.5", "max_steps in {file} must be an integer, got 2.5."),
        ("learning_rate: fast", "learning_rate in {file} must be a number, got 'fast'."),
        ("packing: perhaps", "packing in {file} must be true or false, got 'perhaps'."),
        ("view: [skip]", "view in {file} must be a text, got ['skip']."),
        ("view_args: [3]", "view_args in {file} must be a mapping or a text, got [3]."),
        ("long_documents: cut", "long_documents in {file} must be one of 'truncate', 'split', 'full-rows', got 'cut'."),
        (
            "eval_strategy: no",
            "must be one of 'no', 'steps', 'epoch', got False, as YAML reads yes, no, on and off: put",
        ),
        ("- view: skip", "the recipe {file} must be a YAML mapping, lines of `name: value`, got [{{'view': 'skip'}}]."),
        ("", "the recipe {file} must be a YAML mapping, lines of `name: value`, got None."),
        (
            "view: skip\nview_args: {split: 3\n",
            "the recipe {file} is no YAML: expected ',' or '}}', but got '<strea",
        ),
        ("view: \x07", "the recipe {file} is no YAML: "),
        ("seed: 1\nview: skip\nseed: 2", "the recipe {file} is no YAML: 'seed' is there twice: leave one out in"),
    ],
)
def test_what_no_field_takes_is_told_with_the_file(recipe, message, parse):
    with pytest.raises(ValueError) as error:
        parse(recipe, *ON_CPU)
    said = str(error.value)
    assert message.format(file=parse.file) in said
    assert len(said) < len(str(parse.file)) + 800, "fields of a trainer's config are too many to list"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--learning-rates", "3"], "Unknown flag '--learning-rates'. Did you mean '--learning-rate' or "),
        (["--max-step", "3"], "Unknown flag '--max-step'. Did you mean '--max-steps'"),
        (["--max-steps", "ten"], "--max-steps must be an integer, got 'ten'."),
        (["--learning-rate", "fast"], "--learning-rate must be a number, got 'fast'."),
        (["--optim", "adamw"], "Unknown optim 'adamw'. Did you mean '"),
        (["--max-steps"], "--max-steps: expected one argument"),
        (["--data"], "--data: expected at least one argument."),
        (["--data", "book.txt"], '--data takes files of one JSON object a line, such as {"text": ...}'),
        (["other.yaml"], "'other.yaml' belongs to no flag; a recipe comes first"),
    ],
)
def test_a_flag_that_no_field_takes_is_told(flags, message, parse):
    with pytest.raises(ValueError) as error:
        parse("view: skip", *ON_CPU, *flags)
    assert message in str(error.value)


def test_there_has_to_be_a_recipe_behind_config(tmp_path):
    with pytest.raises(ValueError, match="--config must name a recipe, a YAML file."):
        RecipeParser(FIELDS).parse_args_and_config(["--config"])
    with pytest.raises(OSError, match="the recipe .*nowhere.yaml cannot be read: No such file or directory."):
        RecipeParser(FIELDS).parse_args_and_config(["--config", str(tmp_path / "nowhere.yaml")])


@pytest.mark.parametrize(
    ("typed", "given"),
    [
        (["r.yaml", "--view", "skip"], ["--config", "r.yaml", "--view", "skip"]),
        (["--config", "r.yaml"], ["--config", "r.yaml"]),
        (["--view", "skip", "--config=r.yaml"], ["--view", "skip", "--config", "r.yaml"]),
        (["--view", "skip"], ["--view", "skip"]),
        ([], []),
    ],
)
def test_a_recipe_is_named_alone_or_by_config(typed, given):
    assert with_config_flag(typed) == given


def test_a_recipe_is_named_once():
    with pytest.raises(ValueError, match="the recipe is named twice, as a.yaml and by --config: leave one out."):
        with_config_flag(["a.yaml", "--config", "b.yaml"])


def test_a_model_and_a_text_of_yours_take_the_place_of_those_of_the_recipe(parse):
    recipe = "model_name_or_path: theirs\ndataset_name: someone/books\nlearning_rate: 1.0e-5"
    flags = ["--data", "a.jsonl", "b.jsonl.gz", "--learning-rate", "-1", "--model", "mine", *ON_CPU]
    script, training, model, data = parse(recipe, *flags)
    assert model.model_name_or_path == "mine" and training.learning_rate == -1 and script.dataset_name is None
    assert [(text.path, text.data_files) for text in data.datasets] == [("json", ["a.jsonl", "b.jsonl.gz"])]
    _, _, alone, _ = RecipeParser(FIELDS).parse_args_and_config(["--model", "mine", *ON_CPU])
    assert alone.model_name_or_path == "mine"


def test_other_flags_keep_their_order_and_values():
    typed = ["r.yaml", "--view-args", '{"skip": 3}', "--model", "m", "--lora-target-modules", "q_proj", "v_proj"]
    typed += ["--learning-rate=-1", "--data", "a.jsonl", "--max-steps", "-1"]
    with pytest.raises(OSError):
        recipe_and_flags(typed)
    _, flags, _ = recipe_and_flags(typed[1:])
    assert flags == [*typed[1:3], *typed[5:9], *typed[11:], "--model-name-or-path", "m"]


def test_flags_win_over_the_recipe_and_values_are_read_as_on_the_command_line(parse, monkeypatch):
    monkeypatch.delenv("ROPE_PATCH_TEST", raising=False)
    recipe = """
env: {ROPE_PATCH_TEST: 1}
view: skip
view_args: {skip: {law: uniform, high: 9}}
learning_rate: 1e-4  # a text to YAML, which wants 1.0e-4
max_steps: '7'
packing: 'no'
lora_target_modules: all-linear
eval_strategy: 'no'
datasets: [{path: json, split: train}]
"""
    _, training, model, data = parse(recipe, *ON_CPU, "--view-args", '{"skip": 3}', "--logging-steps", "5")
    assert os.environ.pop("ROPE_PATCH_TEST") == "1"
    assert training.view_args == {"skip": 3} and training.logging_steps == 5
    assert (training.learning_rate, training.max_steps, training.packing) == (1e-4, 7, False)
    assert model.lora_target_modules == "all-linear" and data.datasets[0].path == "json"


def test_a_parser_of_other_dataclasses_knows_their_fields(parse):
    @dataclass
    class Own:
        colour: str = field(default="red", metadata={"help": "Of the curve."})

    (own, model) = parse("colour: blue\ndtype: auto", kinds=(Own, ModelConfig))
    assert own.colour == "blue" and model.dtype == "auto"
    with pytest.raises(ValueError, match="Unknown key 'color' of .*recipe.yaml. Did you mean 'colour'?"):
        parse("color: blue", kinds=(Own,))


def test_every_value_of_a_config_written_to_a_recipe_is_read_again(parse, tmp_path):
    """No type of a field of Transformers or TRL is taken for another."""
    import yaml
    from transformers.hf_argparser import dataclasses

    config = RopeSFTConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False)
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.init}
    plain = {n: getattr(v, "value", v) for n, v in values.items() if not n.startswith("_")}
    written = {n: v for n, v in plain.items() if isinstance(v, bool | int | float | str | list | dict | None)}
    training, _ = parse(yaml.safe_dump(written), kinds=(RopeSFTConfig, DatasetMixtureConfig))
    assert training.to_dict() == config.to_dict()


def test_long_documents_are_cut_where_a_recipe_does_not_say_otherwise(parse):
    recipe = "output_dir: out"
    config = parse(recipe, *ON_CPU, kinds=(RopeSFTConfig,))[0]
    assert (config.max_length, config.long_documents) == (None, "split")
    flags = ["--max-length", "64", "--long-documents", "truncate"]
    config = parse(recipe, *ON_CPU, *flags, kinds=(RopeSFTConfig,))[0]
    assert (config.max_length, config.long_documents) == (64, "truncate")
    with pytest.raises(ValueError, match="packing=True needs rows of one length, got max_length=None: set it"):
        parse(f"{recipe}\npacking: true", *ON_CPU, kinds=(RopeSFTConfig,))
