"""`--accelerate-config NAME`: run the command on several GPUs by accelerate."""

import logging
import os
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml

from rope_patch.base.registry import unknown

from ..engines import rank_failures
from ..engines.rank_failures import RankFailure
from .recipe import read_yaml

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

_CONFIGS = Path(__file__).with_name("accelerate_configs")
_FLAGS = ("--accelerate-config", "--num-processes", "--ranks-per-sequence")
_SEQUENCE_SIZES = {"fsdp2-cp": "cp", "zero3-sp": "sp"}
_ON_CPUS = "On CPUs: torchrun --nproc_per_node N -m trl_ext train RECIPE.yaml --use-cpu true --bf16 false."
_OF_SYSTEM = ("SIGKILL", "SIGSEGV", "SIGBUS", "SIGILL")  # not every system has them


def config_names() -> list[str]:
    """Names that `--accelerate-config` takes."""
    return sorted(path.stem for path in _CONFIGS.glob("*.yaml"))


def quiet_other_ranks() -> None:
    """Silence all but errors on ranks other than the first."""
    if os.environ.get("RANK", "0") == "0":
        return
    from datasets import disable_progress_bars
    from transformers.utils.logging import disable_progress_bar

    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    disable_progress_bars()
    disable_progress_bar()


@dataclass(frozen=True)
class Launch:
    """How to run a command on several GPUs.

    Args:
        config: a name of `config_names`, or a file of accelerate's.
        n_processes: GPUs; None takes all that torch sees, or what a file says.
        ranks_per_sequence: GPUs that share each row, for "fsdp2-cp" and "zero3-sp"; None takes all.
    """

    config: str
    n_processes: int | None = None
    ranks_per_sequence: int | None = None

    @classmethod
    def take(cls, arguments: Sequence[str]) -> "tuple[Launch | None, list[str]]":
        """The launch by its flags, None without any, and the other arguments."""
        values: dict[str, str] = {}
        rest: list[str] = []
        left = list(arguments)
        while left:
            argument = left.pop(0)
            flag, equals, value = argument.partition("=")
            if flag not in _FLAGS:
                rest.append(argument)
            elif not equals and not left:
                raise ValueError(f"{flag} needs a value.")
            else:
                values[flag] = value if equals else left.pop(0)
        if not values:
            return None, rest
        if _FLAGS[0] not in values:
            raise ValueError(f"{next(iter(values))} belongs to --accelerate-config NAME: {', '.join(config_names())}.")
        numbers = {flag: _number(flag, values[flag]) for flag in _FLAGS[1:] if flag in values}
        return cls(values[_FLAGS[0]], *(numbers.get(flag) for flag in _FLAGS[1:])), rest

    def run(self, arguments: Sequence[str]) -> int:
        """Run `rope-patch ARGUMENTS` and return its exit status; the error of a failed rank is printed last.

        Raises:
            ValueError: there is no such config, no GPU, no DeepSpeed where it is needed, or GPUs cannot be shared so.
            KeyboardInterrupt: the user has stopped it.
        """
        # imported here, as some builds of torch lack it, and runs in one process need this module
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            file = folder / "accelerate.yaml"
            file.write_text(yaml.safe_dump(self.settings()))
            try:
                _launch(["--config_file", str(file), "-m", "trl_ext", *arguments], folder)
            except (ChildFailedError, subprocess.CalledProcessError) as error:
                failure = _failure_of(error, folder)
                print(f"\n{failure.text}", file=sys.stderr, flush=True)  # the line may hold a progress bar
                return failure.status
            except SignalException as error:
                if error.sigval == signal.SIGINT:
                    raise KeyboardInterrupt from None
                return 128 + error.sigval  # as shells have it
        return 0

    def settings(self) -> dict[str, Any]:
        """The config of accelerate, with the number of processes filled in."""
        file = Path(self.config)
        if self.config in config_names():
            file = _CONFIGS / f"{self.config}.yaml"
        elif not file.is_file():
            raise unknown("--accelerate-config", self.config, config_names())
        settings: dict[str, Any] = read_yaml(file, f"--accelerate-config {self.config}")
        n = self.n_processes or settings.get("num_processes") or torch.cuda.device_count()
        if not n:
            raise ValueError(f"--accelerate-config {self.config} is for GPUs, and torch sees none. {_ON_CPUS}")
        kind = settings.get("distributed_type")
        if n > 1 and (kind == "NO" or kind == "MULTI_CPU" and not settings.get("mpirun_config")):
            raise ValueError(
                f"--accelerate-config {self.config} has distributed_type {kind}, for which accelerate starts one "
                f"process and not {n}. {_ON_CPUS}"
            )
        if kind == "DEEPSPEED" and find_spec("deepspeed") is None:
            raise ValueError(
                f"--accelerate-config {self.config} needs DeepSpeed: pip install 'rope-patch[deepspeed]', or take "
                "fsdp2."
            )
        return {**settings, "num_processes": n, **self._sequence_sizes(n)}

    def _sequence_sizes(self, n: int) -> dict[str, Any]:
        engine = _SEQUENCE_SIZES.get(self.config)
        if engine is None:
            if self.ranks_per_sequence is not None:
                raise ValueError(
                    f"--ranks-per-sequence is for {' and '.join(_SEQUENCE_SIZES)}, got --accelerate-config "
                    f"{self.config}."
                )
            return {}
        shared = n if self.ranks_per_sequence is None else self.ranks_per_sequence
        if shared < 2 or n % shared:
            raise ValueError(
                f"GPUs that share a sequence must be 2 or more and divide all GPUs, got {shared} of {n}: change "
                "--ranks-per-sequence or --num-processes."
            )
        sizes = {f"{engine}_size": shared}
        if engine == "cp":
            sizes["dp_shard_size"] = n // shared
        else:
            sizes["dp_replicate_size"] = n // shared
        defaults = {"dp_replicate_size": 1, "dp_shard_size": 1, "tp_size": 1, "cp_size": 1, "sp_size": 1}
        extra = {} if engine == "cp" else {"sp_backend": "deepspeed", "sp_attn_implementation": "sdpa"}
        return {"parallelism_config": {f"parallelism_config_{k}": v for k, v in {**defaults, **sizes, **extra}.items()}}


def _launch(arguments: list[str], failures: Path) -> None:
    """Run accelerate's launcher in this process, without its report, which does not show why a rank failed."""
    from accelerate.commands.launch import launch_command, launch_command_parser

    reports = logging.getLogger("torch.distributed.elastic.multiprocessing.api")
    level = reports.level
    reports.setLevel(logging.CRITICAL)
    os.environ[rank_failures.FOLDER] = str(failures)  # ranks inherit it
    try:
        launch_command(launch_command_parser().parse_args(arguments))
    finally:
        del os.environ[rank_failures.FOLDER]
        reports.setLevel(level)


def _failure_of(error: "ChildFailedError | subprocess.CalledProcessError", folder: Path) -> RankFailure:
    """Why the first of the ranks failed, from its own report or its exit status."""
    left = RankFailure.first(folder)
    if isinstance(error, subprocess.CalledProcessError):  # a single process
        return left or RankFailure(0, error.returncode, f"the process ended with status {error.returncode}.", 0.0)
    rank, first = error.get_first_failure()
    for other, process in error.failures.items():
        # a rank that the system kills writes no report, and the ranks that wait for it fail later
        if process.signal_name() in _OF_SYSTEM and process.timestamp <= first.timestamp + 1:
            what = f"rank {other} was ended by {process.signal_name()}"
            memory = ": the memory of the host may be too small" if process.signal_name() == "SIGKILL" else ""
            return RankFailure(other, 128 - process.exitcode, f"{what}{memory}.", 0.0)  # exitcode is minus the signal
    if left is not None:
        traceback = "\n" in left.text
        return replace(left, text=f"rank {left.rank} has failed:\n{left.text}") if traceback else left
    return RankFailure(rank, first.exitcode, f"rank {rank} ended with status {first.exitcode}.", 0.0)


def _number(flag: str, value: str) -> int:
    if not value.isdigit() or not int(value):
        raise ValueError(f"{flag} must be a number of GPUs of at least 1, got {value!r}.")
    return int(value)
