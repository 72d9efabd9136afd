"""A queue of commands, several at a time on each GPU: runs of small models fill a GPU only together.

Run: python research/experiments/run_queue.py QUEUE [--gpus 0 1] [--workers 3] [--minutes 25] [--stay] [--logs FOLDER]

A line of QUEUE is a command, with conditions in front of it if it has any:

    needs=taught/config.json seconds=120 python research/experiments/rpsd_small_scale.py taught --arms skip --seeds 0

`needs` names a file that must be there, which an earlier command may write; `seconds` is what the command takes, so
that none begins that --minutes would cut off. One that runs for `limit` seconds hangs, and is ended by SIGABRT, upon
which Python writes to the log where each thread stands; without a `limit` it has all the time that it takes, as what
shares a GPU takes longer than alone. A worker takes the first line whose conditions hold. Lines that are added to QUEUE
while it runs are taken too; with --stay workers wait for them, and for files of others, until --minutes are over. Each
command of ours takes its worker's part of the GPU's memory at most, so that none is left without by what others hold
unused. Where NVIDIA's MPS is running, kernels of several processes share a GPU, and a process that is ended by a signal
takes those beside it along.
"""

import argparse
import os
import shlex
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from result_lines import Deadline

GPU_SHARE = "GPU_SHARE"  # variable with the part of a GPU's memory that PyTorch may take in a command of ours
CONTEXTS = 0.05  # of a GPU's memory, beside PyTorch's


@dataclass(frozen=True)
class Command:
    """A line of the queue.

    Args:
        words: of the command.
        needs: a file without which it does not begin, or None.
        seconds: that it takes; 0 if that is not known.
        limit: seconds after which it is taken to hang, or None.
    """

    words: tuple[str, ...]
    needs: Path | None = None
    seconds: float = 0.0
    limit: float | None = None

    @property
    def may_begin(self) -> bool:
        """Whether what it needs is there."""
        return self.needs is None or self.needs.exists()

    @classmethod
    def of(cls, line: str) -> "Command":
        """Read a line.

        Raises:
            ValueError: it has conditions alone.
        """
        words, conditions = shlex.split(line), {}
        while words and words[0].partition("=")[0] in ("needs", "seconds", "limit"):
            name, _, conditions[name] = words.pop(0).partition("=")
        if not words:
            raise ValueError(f"a line of the queue must have a command behind its conditions, got {line!r}.")
        needs = Path(conditions["needs"]) if "needs" in conditions else None
        limit = float(conditions["limit"]) if "limit" in conditions else None
        return cls(tuple(words), needs, float(conditions.get("seconds", 0.0)), limit)


class Queue:
    """Commands of a file, each of which runs once.

    Args:
        file: of lines.
        deadline: by which all that begins is to end.
        logs: folder that gets what commands print, a file for each line's number.
        stay: wait until the deadline for lines that are added and for files that others write.
    """

    def __init__(self, file: Path, deadline: Deadline, logs: Path, stay: bool = False) -> None:
        self.file, self.deadline, self.logs, self.stay = file, deadline, logs, stay
        self._taken: set[int] = set()
        self._running: set[int] = set()
        self._failed: set[int] = set()
        self._lock = threading.Lock()
        self._share = 1 - CONTEXTS

    def run(self, gpus: list[str], workers: int) -> list[int]:
        """Run until nothing more can begin, with so many workers on each GPU; numbers of the lines that failed."""
        self.logs.mkdir(parents=True, exist_ok=True)
        self._share = (1 - CONTEXTS) / workers
        with ThreadPoolExecutor(len(gpus) * workers) as pool:
            for worker in [pool.submit(self._work, gpu) for _ in range(workers) for gpu in gpus]:
                worker.result()
        return sorted(self._failed)

    def _work(self, gpu: str) -> None:
        while True:
            with self._lock:
                waiting = self._waiting()
                number = next((k for k, command in waiting.items() if command.may_begin), None)
                # what runs may write what others need
                hope = self.deadline.leaves(0) if self.stay else waiting and self._running
                if number is None and not hope:
                    return
                if number is not None:
                    self._taken.add(number)
                    self._running.add(number)
            if number is None:
                time.sleep(0.2)
                continue
            code = self._call(number, waiting[number], gpu)
            with self._lock:
                self._running.remove(number)
                if code:
                    self._failed.add(number)

    def _waiting(self) -> dict[int, Command]:
        lines = enumerate(self.file.read_text(encoding="utf-8").splitlines())
        known = {k: Command.of(line) for k, line in lines if line.strip() and k not in self._taken}
        return {k: command for k, command in known.items() if self.deadline.leaves(command.seconds)}

    def _call(self, number: int, command: Command, gpu: str) -> int:
        """Run a command; its exit status."""
        begin = time.monotonic()
        print(f"{time.strftime('%H:%M:%S')} GPU {gpu}  begin {number}: {shlex.join(command.words)}", flush=True)
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu, "PYTHONFAULTHANDLER": "1"}
        environment[GPU_SHARE] = str(self._share)
        with (self.logs / f"{number:03}.log").open("wb") as log:
            with subprocess.Popen(command.words, stdout=log, stderr=subprocess.STDOUT, env=environment) as process:
                try:
                    code = process.wait(command.limit)
                except subprocess.TimeoutExpired:
                    process.send_signal(signal.SIGABRT)
                    code = process.wait()
        said = f"{'end' if code == 0 else f'FAILED ({code})'} {number} after {time.monotonic() - begin:.0f} s"
        print(f"{time.strftime('%H:%M:%S')} GPU {gpu}  {said}", flush=True)
        return code


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("queue", type=Path)
    parser.add_argument("--gpus", nargs="+", default=["0"])
    parser.add_argument("--workers", type=int, default=1, help="processes of a GPU")
    parser.add_argument("--minutes", type=float, help="in which all that begins is to end")
    parser.add_argument("--stay", action="store_true", help="wait for lines and files until --minutes are over")
    parser.add_argument("--logs", type=Path, default=Path("run_queue_logs"))
    args = parser.parse_args()
    if args.stay and args.minutes is None:
        parser.error("--stay ends with --minutes: give both")
    failed = Queue(args.queue, Deadline(args.minutes), args.logs, args.stay).run(args.gpus, args.workers)
    if failed:
        raise SystemExit(f"failed: lines {', '.join(map(str, failed))}; see {args.logs}")


if __name__ == "__main__":
    main()
