"""`--accelerate_config`: what accelerate is told, and what is refused before anything starts."""

import subprocess

import pytest
import yaml
from accelerate.commands.launch import _validate_launch_command, launch_command_parser

from trl_ext import cli, launching
from trl_ext.launching import Launch, config_names


@pytest.fixture(autouse=True)
def four_gpus(monkeypatch):
    monkeypatch.setattr(launching.torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(launching, "find_spec", lambda name: name)  # DeepSpeed is there


@pytest.mark.parametrize("name", config_names())
def test_accelerate_takes_each_config(tmp_path, name):
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(Launch(name).settings()))
    arguments = launch_command_parser().parse_args(["--config_file", str(file), "-m", "trl_ext", "train"])
    args, _, _ = _validate_launch_command(arguments)
    assert args.num_processes == 4 and args.mixed_precision == "bf16"
    engines = {
        "use_fsdp": name.startswith("fsdp2"),
        "use_deepspeed": name.startswith("zero"),
        "multi_gpu": name == "ddp",
    }
    assert {key: bool(getattr(args, key)) for key in engines} == engines
    if name.startswith("fsdp2"):
        assert int(args.fsdp_version) == 2
    if name.startswith("zero"):
        assert args.zero_stage == int(name[4])
    shared = {"fsdp2-cp": ("cp", 4), "zero3-sp": ("sp", 4)}.get(name)
    assert args.use_parallelism_config == (shared is not None)
    if shared is not None:
        assert int(getattr(args, f"parallelism_config_{shared[0]}_size")) == shared[1]


def test_gpus_share_a_row_by_twos(tmp_path):
    settings = Launch("fsdp2-cp", ranks_per_sequence=2).settings()["parallelism_config"]
    assert (settings["parallelism_config_cp_size"], settings["parallelism_config_dp_shard_size"]) == (2, 2)
    settings = Launch("zero3-sp", n_processes=2).settings()["parallelism_config"]
    assert (settings["parallelism_config_sp_size"], settings["parallelism_config_dp_replicate_size"]) == (2, 1)


def test_the_command_is_launched_without_its_own_flags(tmp_path, monkeypatch):
    commands = []

    def run(command):
        config = yaml.safe_load(open(command[command.index("--config_file") + 1]).read())
        commands.append((config["num_processes"], command[command.index("-m", 2) + 1 :]))
        return subprocess.CompletedProcess(command, 7)

    monkeypatch.setattr(launching.subprocess, "run", run)
    flags = ["--accelerate_config=fsdp2", "--num_processes", "2", "--learning_rate", "1e-5"]
    assert cli.main(["train", "recipe.yaml", *flags]) == 7
    assert commands == [(2, ["trl_ext", "train", "--config", "recipe.yaml", "--learning_rate", "1e-5"])]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--accelerate_config", "fsdp3"], "Did you mean 'fsdp2'"),
        (["--accelerate_config"], "needs a value"),
        (["--num_processes", "2"], "belongs to --accelerate_config NAME: ddp, fsdp2"),
        (["--accelerate_config", "ddp", "--num_processes", "two"], "at least 1, got 'two'"),
        (["--accelerate_config", "fsdp2", "--ranks_per_sequence", "2"], "is for fsdp2-cp and zero3-sp"),
        (["--accelerate_config", "fsdp2-cp", "--ranks_per_sequence", "3"], "got 3 of 4"),
    ],
)
def test_a_wrong_launch_is_refused(arguments, text):
    with pytest.raises(ValueError, match=text):
        launch, _ = Launch.take(arguments)
        launch.settings()


def test_what_a_machine_lacks_is_said(monkeypatch):
    monkeypatch.setattr(launching, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="needs DeepSpeed: pip install"):
        Launch("zero3").settings()
    monkeypatch.setattr(launching.torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match="torch sees none"):
        Launch("fsdp2").settings()
