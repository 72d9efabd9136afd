"""`--accelerate_config NAME`: the same command on several GPUs, started by accelerate."""

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import yaml

from rope_patch.registry import unknown

_CONFIGS = Path(__file__).with_name("accelerate_configs")
_FLAGS = ("--accelerate_config", "--num_processes", "--ranks_per_sequence")
_SEQUENCE_SIZES = {"fsdp2-cp": "cp", "zero3-sp": "sp"}


def config_names() -> list[str]:
    """Names that `--accelerate_config` takes."""
    return sorted(path.stem for path in _CONFIGS.glob("*.yaml"))


@dataclass(frozen=True)
class Launch:
    """How a command is to run on several GPUs.

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
        """What the flags of a launch say, None without any, and the other arguments.

        Raises:
            ValueError: a flag lacks its value, is no number where one is needed, or stands without --accelerate_config.
        """
        said: dict[str, str] = {}
        rest: list[str] = []
        left = [part for argument in arguments for part in _split(argument)]
        while left:
            flag = left.pop(0)
            if flag not in _FLAGS:
                rest.append(flag)
            elif not left:
                raise ValueError(f"{flag} needs a value.")
            else:
                said[flag] = left.pop(0)
        if not said:
            return None, rest
        if _FLAGS[0] not in said:
            raise ValueError(f"{next(iter(said))} belongs to --accelerate_config NAME: {', '.join(config_names())}.")
        numbers = {flag: _number(flag, said[flag]) for flag in _FLAGS[1:] if flag in said}
        return cls(said[_FLAGS[0]], *(numbers.get(flag) for flag in _FLAGS[1:])), rest

    def run(self, arguments: Sequence[str]) -> int:
        """Run `rope-patch ARGUMENTS` so, and return its exit status.

        Raises:
            ValueError: there is no such config, no GPU, no DeepSpeed where it is needed, or GPUs cannot be shared so.
        """
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "accelerate.yaml"
            file.write_text(yaml.safe_dump(self.settings()))
            command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(file)]
            return subprocess.run([*command, "-m", "trl_ext", *arguments]).returncode

    def settings(self) -> dict[str, Any]:
        """The config of accelerate, with the number of processes filled in."""
        file = Path(self.config)
        if self.config in config_names():
            file = _CONFIGS / f"{self.config}.yaml"
        elif not file.is_file():
            raise unknown("accelerate_config", self.config, config_names())
        settings: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
        n = self.n_processes or settings.get("num_processes") or torch.cuda.device_count()
        if not n:
            raise ValueError(
                f"--accelerate_config {self.config} is for GPUs, and torch sees none. On CPUs: torchrun "
                "--nproc_per_node N -m trl_ext train RECIPE.yaml --use_cpu true --bf16 false."
            )
        if settings.get("distributed_type") == "DEEPSPEED" and find_spec("deepspeed") is None:
            raise ValueError(
                f"--accelerate_config {self.config} needs DeepSpeed: pip install 'rope-patch[deepspeed]', or take "
                "fsdp2."
            )
        return {**settings, "num_processes": n, **self._sequence_sizes(n)}

    def _sequence_sizes(self, n: int) -> dict[str, Any]:
        engine = _SEQUENCE_SIZES.get(self.config)
        if engine is None:
            if self.ranks_per_sequence is not None:
                raise ValueError(
                    f"--ranks_per_sequence is for {' and '.join(_SEQUENCE_SIZES)}, got --accelerate_config "
                    f"{self.config}."
                )
            return {}
        shared = n if self.ranks_per_sequence is None else self.ranks_per_sequence
        if shared < 2 or n % shared:
            raise ValueError(
                f"GPUs that share a row must be 2 or more and divide all GPUs, got {shared} of {n}: change "
                "--ranks_per_sequence or --num_processes."
            )
        sizes = {f"{engine}_size": shared}
        if engine == "cp":
            sizes["dp_shard_size"] = n // shared
        else:
            sizes["dp_replicate_size"] = n // shared
        defaults = {"dp_replicate_size": 1, "dp_shard_size": 1, "tp_size": 1, "cp_size": 1, "sp_size": 1}
        of_engine = {} if engine == "cp" else {"sp_backend": "deepspeed", "sp_attn_implementation": "sdpa"}
        return {
            "parallelism_config": {f"parallelism_config_{k}": v for k, v in {**defaults, **sizes, **of_engine}.items()}
        }


def _split(argument: str) -> list[str]:
    flag, equals, value = argument.partition("=")
    return [flag, value] if equals and flag in _FLAGS else [argument]


def _number(flag: str, value: str) -> int:
    if not value.isdigit() or not int(value):
        raise ValueError(f"{flag} must be a number of GPUs of at least 1, got {value!r}.")
    return int(value)
