"""A model is extended, and checked, with the weights of its files alone."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from trl_ext import cli
from trl_ext.extension.facts import ModelFacts


def test_a_model_whose_weights_are_not_whole_is_neither_extended_nor_checked(folder, tmp_path, capsys):
    lacking = tmp_path / "lacking"
    shutil.copytree(folder / "base", lacking)
    weights = load_file(lacking / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, lacking / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="lacking lack model.norm.weight of the .* would get random ones"):
        ModelFacts.of(str(lacking)).load(torch.float32)
    assert cli.main(["check", str(lacking)]) == 2
    assert "lacking lack model.norm.weight" in capsys.readouterr().err
