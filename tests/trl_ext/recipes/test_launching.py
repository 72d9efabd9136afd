"""`--accelerate-config`: what accelerate is told, and what is refused before anything starts."""

import json
import os
import signal

import pytest
import yaml
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from support.launched import run_python
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from trl_ext import cli
from trl_ext.recipes import launching
from trl_ext.recipes.launching import Launch, config_names


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
    assert args.num_processes == 4
    assert args.mixed_precision == "no", "the recipe says the precision, and a launcher's would mislead a reader"
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
    args.deepspeed_fields_from_accelerate_config = ""  # as accelerate sets it before it starts ranks
    prepare = prepare_deepspeed_cmd_env if name.startswith("zero") else prepare_multi_gpu_env
    prepare(args)
    assert int(args.main_process_port or args.master_port) not in (0, 29500)  # which another job may have


def test_gpus_share_a_row_by_twos(tmp_path):
    settings = Launch("fsdp2-cp", ranks_per_sequence=2).settings()["parallelism_config"]
    assert (settings["parallelism_config_cp_size"], settings["parallelism_config_dp_shard_size"]) == (2, 2)
    settings = Launch("zero3-sp", n_processes=2).settings()["parallelism_config"]
    assert (settings["parallelism_config_sp_size"], settings["parallelism_config_dp_replicate_size"]) == (2, 1)


def test_the_command_is_launched_without_its_own_flags(monkeypatch):
    launched = []

    def launch(arguments, failures):
        config = yaml.safe_load(open(arguments[arguments.index("--config_file") + 1]).read())
        launched.append((config["num_processes"], arguments[arguments.index("-m") + 1 :]))

    monkeypatch.setattr(launching, "_launch", launch)
    flags = ["--accelerate-config=fsdp2", "--num-processes", "2", "--learning-rate", "1e-5"]
    assert cli.main(["train", "recipe.yaml", *flags]) == 0
    assert launched == [(2, ["trl_ext", "train", "--config", "recipe.yaml", "--learning-rate", "1e-5"])]


def failed(rank, status, seconds):
    failure = ProcessFailure(local_rank=rank, pid=rank, exitcode=status, error_file="")
    failure.timestamp = seconds
    return failure


@pytest.mark.parametrize(
    ("ended", "left", "status", "text"),
    [
        ([(0, 1, 5), (1, -15, 5)], [(0, "tool: a mistake", 2)], 2, "tool: a mistake"),
        # the other has failed first, and takes longer to end
        (
            [(0, 1, 5), (1, -15, 5)],
            [(1, "Traceback:\nb", 1), (0, "Traceback:\na", 1)],
            1,
            "rank 1 has failed:\nTraceback:\nb",
        ),
        ([(0, 3, 5), (1, -15, 5)], [], 3, "rank 0 ended with status 3."),
        (
            [(0, 1, 5), (1, -9, 5)],
            [(0, "Traceback:\nlost", 1)],
            137,
            "rank 1 was ended by SIGKILL: the memory of the host",
        ),
        ([(0, 1, 5), (1, -9, 35)], [(0, "tool: a mistake", 2)], 2, "tool: a mistake"),  # ended as it hung
        ([(0, -11, 5)], [], 139, "rank 0 was ended by SIGSEGV."),
    ],
)
def test_the_first_failure_is_told(monkeypatch, capsys, ended, left, status, text):
    def launch(arguments, failures):
        for seconds, (rank, message, of_rank) in enumerate(left):
            file = failures / f"rank-{rank}.json"
            file.write_text(json.dumps({"rank": rank, "status": of_rank, "text": message, "seconds": seconds}))
        raise ChildFailedError("trl_ext", {rank: failed(rank, code, when) for rank, code, when in ended})

    monkeypatch.setattr(launching, "_launch", launch)
    assert Launch("ddp").run(["train"]) == status
    assert capsys.readouterr().err.startswith(f"\n{text}")


def test_ctrl_c_stops_the_ranks_and_the_command(monkeypatch, capsys):
    def launch(arguments, failures):
        raise SignalException("stopped", signal.SIGINT)

    monkeypatch.setattr(launching, "_launch", launch)
    assert cli.main(["train", "recipe.yaml", "--accelerate-config", "ddp"]) == 130
    assert "Stopped." in capsys.readouterr().err


@pytest.mark.slow
def test_ranks_but_the_first_say_errors_alone():
    code = """
import logging, warnings
from trl_ext.recipes.launching import quiet_other_ranks
quiet_other_ranks()
warnings.warn("a warning")
logging.getLogger("trl_ext").warning("a record")
logging.getLogger("trl_ext").error("an error")
"""
    for rank, told in (("0", ["a warning", "a record", "an error"]), ("1", ["an error"])):
        done = run_python("-c", code, env={**os.environ, "RANK": rank})
        done.check_returncode()
        assert [what for what in ("a warning", "a record", "an error") if what in done.stderr] == told


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--accelerate-config", "fsdp3"], "Did you mean 'fsdp2'"),
        (["--accelerate-config"], "needs a value"),
        (["--num-processes", "2"], "belongs to --accelerate-config NAME: ddp, fsdp2"),
        (["--accelerate-config", "ddp", "--num-processes", "two"], "at least 1, got 'two'"),
        (["--accelerate-config", "fsdp2", "--ranks-per-sequence", "2"], "is for fsdp2-cp and zero3-sp"),
        (["--accelerate-config", "fsdp2-cp", "--ranks-per-sequence", "3"], "got 3 of 4"),
    ],
)
def test_a_wrong_launch_is_refused(arguments, text):
    with pytest.raises(ValueError, match=text):
        launch, _ = Launch.take(arguments)
        launch.settings()


@pytest.mark.parametrize("kind", ["NO", "MULTI_CPU"])
def test_a_file_of_which_accelerate_starts_one_process_is_refused(tmp_path, kind):
    file = tmp_path / "cpus.yaml"
    file.write_text(f"distributed_type: {kind!r}\n")
    with pytest.raises(
        ValueError, match=f"{kind}, for which accelerate starts one process and not 2. On CPUs: torchrun"
    ):
        Launch(str(file), n_processes=2).settings()
    assert Launch(str(file), n_processes=1).settings()["num_processes"] == 1


def test_what_a_machine_lacks_is_said(monkeypatch):
    monkeypatch.setattr(launching, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="needs DeepSpeed: pip install"):
        Launch("zero3").settings()
    monkeypatch.setattr(launching.torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match="torch sees none"):
        Launch("fsdp2").settings()


def test_a_file_that_is_no_config_is_refused(tmp_path):
    (tmp_path / "own.yaml").write_text("{a: [")
    with pytest.raises(ValueError, match="is no YAML: "):
        Launch(str(tmp_path / "own.yaml"), n_processes=2).settings()
