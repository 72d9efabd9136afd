"""A checkpoint whose weights are in parts alone is refused with the command that makes it plain."""

import pytest

from rope_patch import export
from rope_patch.checkpoints.weights_in_parts import require_whole_weights
from trl_ext import cli

FSDP = ["config.json", "pytorch_model_fsdp_0/__0_0.distcp"]
ZERO = ["config.json", "zero_to_fp32.py", "latest"]


def folder_with(folder, files):
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).touch()
    return folder


@pytest.mark.parametrize(
    ("files", "command"),
    [
        (FSDP, "`accelerate merge-weights '{0}'/pytorch_model_fsdp_0 '{0}'`"),
        (
            ["adapter_config.json", *FSDP],
            "`accelerate merge-weights '{0}'/pytorch_model_fsdp_0 '{0}' && "
            "mv '{0}'/model.safetensors '{0}'/adapter_model.safetensors`",
        ),
        (ZERO, "`python '{0}'/zero_to_fp32.py '{0}' '{0}' --safe_serialization`"),
    ],
    ids=["fsdp", "fsdp-adapter", "zero"],
)
def test_the_command_is_named(tmp_path, capsys, files, command):
    folder = folder_with(tmp_path / "a run" / "checkpoint-2", files)
    for refused in (lambda: require_whole_weights(folder, "model"), lambda: export(folder, tmp_path / "out")):
        with pytest.raises(ValueError, match="^model: the weights in .* are in parts") as error:
            refused()
        assert command.format(folder) in str(error.value)
    assert cli.main(["export", str(folder), "--output", str(tmp_path / "out")]) == 2
    assert command.format(folder) in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.parametrize("weights", ["model.safetensors", "model-00001-of-00002.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("files", [FSDP, ZERO])
def test_whole_weights_beside_the_parts_pass(tmp_path, files, weights):
    require_whole_weights(folder_with(tmp_path, [*files, weights]), "model")


def test_a_hub_id_and_a_folder_without_weights_pass(tmp_path):
    require_whole_weights("an/id", "model")
    require_whole_weights(tmp_path, "model")


def test_what_fsdp_goes_on_from_is_no_plain_checkpoint(tmp_path):
    with pytest.raises(ValueError, match="merge-weights"):
        require_whole_weights(folder_with(tmp_path, [*FSDP, "pytorch_model_fsdp.bin"]), "model")
