"""Python commands, and jobs of several ranks, that tests start.

Each is forked from a process that has imported what nearly all of them import, which saves 6 CPU seconds and more.
The packages of this repository are not among it, so that a command sees its own `PYTHONPATH` and entry points.
"""

import faulthandler
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any
from unittest import mock

# In three runs of the suite one rank of one job was ended in its midst. One of them kept its last words: "terminate
# called without an active exception", which is C++'s for a thread that nobody joined. This package starts none.
ABORTED = "Signal 6 (SIGABRT)"

# what libraries read once, as they are imported: jobs are on CPUs, and a variable of one test is not for the next one
_ENVIRONMENT = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["torch.distributed.run", "transformers.models.llama.modeling_llama", "datasets", "peft", "trl.trainer.sft_trainer"]
)


def run_python(
    *arguments: str, env: dict[str, str] | None = None, cwd: Path | None = None, timeout: float = 600
) -> subprocess.CompletedProcess[str]:
    """`python *arguments`, of a script, -m module or -c code, as `subprocess.run` returns it with what is printed.

    What libraries read as they are imported is no longer read from `env`; `sys.path` is that of the tests, after
    `PYTHONPATH`.
    """
    return _run([list(arguments)], [dict(os.environ if env is None else env)], cwd, timeout)


def run_ranks(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run what torchrun would start, `[python, "-m", "torch.distributed.run", ...]`, and keep what is printed.

    A command without torchrun is one process. A job whose rank SIGABRT ended runs once more, with a warning.
    """
    done = run_ranks_once(command, **options)
    if done.returncode and ABORTED in done.stderr:
        warnings.warn(f"SIGABRT ended a rank, and its job runs again:\n{done.stderr[-4000:]}", stacklevel=2)
        done = run_ranks_once(command, **options)
    return done


def run_ranks_once(
    command: list[str], env: dict[str, str], cwd: Path | None = None, timeout: float = 3000
) -> subprocess.CompletedProcess[str]:
    """`run_ranks` without its second attempt."""
    env = {**env, "PYTHONFAULTHANDLER": "1"}  # a rank that a signal ends prints its stack
    arguments = command[1:]
    if arguments[:2] != ["-m", "torch.distributed.run"]:
        return _run([arguments], [env], cwd, timeout)
    arguments = arguments[2:]
    options = {"--master_port": str(_free_port())}
    while arguments[0].startswith("--"):
        name = arguments.pop(0)
        if name != "--standalone":
            options[name] = arguments.pop(0)
    world, port = options["--nproc_per_node"], options["--master_port"]
    env |= {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    environments = [{**env, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(int(world))]
    return _run([arguments] * int(world), environments, cwd, timeout)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])


def _run(
    commands: list[list[str]], environments: list[dict[str, str]], cwd: Path | None, timeout: float
) -> subprocess.CompletedProcess[str]:
    """Run commands side by side until all end, or the first that fails, or the time is over: then the rest is ended."""
    with mock.patch.dict(os.environ, _ENVIRONMENT, clear=True):
        forkserver.ensure_running()
    until = time.monotonic() + timeout
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        processes = [
            _CONTEXT.Process(target=_main, args=(command, environment, str(cwd or Path.cwd()), str(out), str(err)))
            for command, environment in zip(commands, environments, strict=True)
        ]
        for process in processes:
            process.start()
        left = processes
        while left and not any(p.exitcode for p in processes) and time.monotonic() < until:
            connection.wait([p.sentinel for p in left], until - time.monotonic())
            left = [p for p in processes if p.exitcode is None]
        failed = [(rank, p.exitcode) for rank, p in enumerate(processes) if p.exitcode]
        for process in left:
            process.join(1)  # it may be about to fail alike
        for process in left:
            process.terminate()
            process.join(30)
            process.kill()
            process.join()
        printed, errors = (file.read_text(errors="replace") if file.exists() else "" for file in (out, err))
    if left and not failed:
        errors, failed = f"{errors}\nended after {timeout:.0f} seconds", [(0, 1)]
    rank, status = failed[0] if failed else (0, 0)
    if status < 0:
        errors += f"\nrank {rank} was ended by Signal {-status} ({signal.Signals(-status).name})"
    return subprocess.CompletedProcess(commands[0], status, printed, errors)


def _main(command: list[str], environment: dict[str, str], cwd: str, out: str, err: str) -> None:
    """What the forked process does."""
    for stream, file in ((sys.stdout, out), (sys.stderr, err)):
        stream.flush()
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1 if stream is sys.stdout else 2)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    if "PYTHONFAULTHANDLER" in environment:
        faulthandler.enable()
    first = command[0]
    sys.argv = command[1:] if first in ("-m", "-c") else command
    here = "" if first in ("-m", "-c") else str(Path(first).parent.resolve())
    sys.path[:0] = [here, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    try:
        if first == "-m":
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        elif first == "-c":
            code, sys.argv[0] = sys.argv[0], "-c"
            exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
        else:
            runpy.run_path(first, run_name="__main__")
    except Exception:
        sys.excepthook(*sys.exc_info())
        sys.exit(1)
