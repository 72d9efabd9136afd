"""A recipe's key that no config has is named with its file and what was meant, before anything else is read."""

import runpy
import sys
from pathlib import Path

import pytest
from trl import DatasetMixtureConfig, ModelConfig, TrlParser

from trl_ext import RopeSFTConfig, require_known_keys

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("script", "recipe", "message"),
    [
        ("sft.py", "vew: skip", "Unknown key 'vew' of {file}. Did you mean 'view'"),
        ("sft.py", "view: skip\nlearning-rate: 1.0e-5", "Unknown key 'learning-rate' of {file}. Did you mean 'learn"),
        ("sft.py", "view_arg: {max_skip: 3}", "Did you mean 'view_args' or 'view'"),
        ("sft.py", "zzzz: 1", "Unknown key 'zzzz' of {file}. --help explains each."),
        ("sft.py", "help: 1", "Unknown key 'help' of {file}."),
        ("sft.py", "on: 1", "Unknown key True of {file}."),
        (
            "sft.py",
            "datasets: [{path: json}, {path: json, data_file: train.jsonl}]",
            "Unknown key 'data_file' of `datasets` in {file}. Did you mean 'data_files'? Known: columns, data_dir",
        ),
        ("restore.py", "output_dir: out\nrescle: pi", "Unknown key 'rescle' of {file}. Did you mean 'rescale'"),
        ("restore.py", "objective: clm", "Unknown key 'objective' of {file}. Known: attn_implementation, bnb_4bit"),
    ],
)
def test_an_unknown_key_stops_a_script(script, recipe, message, tmp_path, monkeypatch, capsys):
    file = tmp_path / "recipe.yaml"
    file.write_text(recipe)
    monkeypatch.setattr(sys, "argv", [script, "--config", str(file)])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    said = capsys.readouterr().err
    assert stop.value.code == 1 and message.format(file=file) in said and said.count("\n") == 1
    assert len(said) < len(str(file)) + 800, "fields of a trainer's config are too many to list"


def test_a_command_line_goes_on_to_trl(tmp_path):
    parser = TrlParser((RopeSFTConfig, ModelConfig, DatasetMixtureConfig))
    file = tmp_path / "recipe.yaml"
    file.write_text("env: {ROPE_PATCH_TEST: 1}\nview: skip\nuse_cpu: true\ndatasets: [{path: json, split: train}]")
    for arguments in ([], ["--config"], ["--view", "skip"], ["--config", str(file), "--learning_rate", "1e-5"]):
        require_known_keys(parser, arguments)
    file.write_text("- view: skip")  # no keys at all: TRL's error
    require_known_keys(parser, ["--config", str(file)])
    with pytest.raises(ValueError, match="must contain a YAML mapping"):
        parser.parse_args_and_config(["--config", str(file)])
