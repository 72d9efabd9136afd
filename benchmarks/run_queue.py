"""A queue of commands, several at a time on each GPU: runs of small models fill a GPU only together.

Run: python benchmarks/run_queue.py QUEUE [--gpus 0 1] [--workers 3] [--minutes 25] [--logs FOLDER]

A line of QUEUE is a command, with conditions in front of it if it has any:

    needs=taught/config.json seconds=120 python benchmarks/rpsd_small_scale.py taught --arms skip --seeds 0

`needs` names a file that must be there, which an earlier command may write; `seconds` is what the command takes, so
that none begins that --minutes would cut off. A worker takes the first line whose conditions hold. Lines that are added
to QUEUE while it runs are taken too. Where NVIDIA's MPS is running, kernels of several processes share a GPU.
"""

import argparse
import os
import shlex
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from result_lines import Deadline


@dataclass(frozen=True)
class Command:
    """A line of the queue.

    Args:
        words: of the command.
        needs: a file without which it does not begin, or None.
        seconds: that it takes.
    """

    words: tuple[str, ...]
    needs: Path | None = None
    seconds: float = 0.0

    @classmethod
    def of(cls, line: str) -> "Command":
        """Read a line.

        Raises:
            ValueError: it has conditions alone.
        """
        words, needs, seconds = shlex.split(line), None, 0.0
        while words and words[0].partition("=")[0] in ("needs", "seconds"):
            name, _, value = words.pop(0).partition("=")
            if name == "needs":
                needs = Path(value)
            else:
                seconds = float(value)
        if not words:
            raise ValueError(f"a line of the queue must have a command behind its conditions, got {line!r}.")
        return cls(tuple(words), needs, seconds)


class Queue:
    """Commands of a file, each of which is taken once."""

    def __init__(self, file: Path, deadline: Deadline) -> None:
        self.file, self.deadline = file, deadline
        self.taken: set[int] = set()
        self.lock = threading.Lock()

    def take(self) -> tuple[int, Command] | None:
        """The first command that may begin, and its line's number."""
        with self.lock:
            for number, command in self._waiting():
                if command.needs is None or command.needs.exists():
                    self.taken.add(number)
                    return number, command
        return None

    def ended(self, running: int) -> bool:
        """Whether nothing more can begin, where so many commands run that may write what others need."""
        with self.lock:
            waiting = self._waiting()
            return not waiting or (running == 0 and not any(c.needs is None or c.needs.exists() for _, c in waiting))

    def _waiting(self) -> list[tuple[int, Command]]:
        lines = enumerate(self.file.read_text(encoding="utf-8").splitlines())
        known = [(k, Command.of(line)) for k, line in lines if line.strip() and k not in self.taken]
        return [(k, command) for k, command in known if self.deadline.leaves(command.seconds)]


class Workers:
    """Threads that each run one command at a time on a GPU.

    Args:
        queue: of commands.
        gpus: by their numbers.
        a_gpu: workers of each.
        logs: folder that gets what commands print.
    """

    def __init__(self, queue: Queue, gpus: list[str], a_gpu: int, logs: Path) -> None:
        self.queue, self.logs = queue, logs
        self.failed: list[int] = []
        self._running = 0
        self._count = threading.Lock()
        self._threads = [threading.Thread(target=self._work, args=(gpu,)) for _ in range(a_gpu) for gpu in gpus]

    def run(self) -> list[int]:
        """Run until nothing more can begin; numbers of the lines whose commands failed."""
        self.logs.mkdir(parents=True, exist_ok=True)
        for thread in self._threads:
            thread.start()
        for thread in self._threads:
            thread.join()
        return sorted(self.failed)

    def _work(self, gpu: str) -> None:
        while True:
            with self._count:
                taken = self.queue.take()
                if taken is None and self.queue.ended(self._running):
                    return
                self._running += taken is not None
            if taken is None:
                time.sleep(0.2)
                continue
            number, command = taken
            begin = time.monotonic()
            print(f"{time.strftime('%H:%M:%S')} GPU {gpu}  begin {number}: {shlex.join(command.words)}", flush=True)
            with (self.logs / f"{number:03}.log").open("wb") as log:
                environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu}
                code = subprocess.run(command.words, stdout=log, stderr=subprocess.STDOUT, env=environment).returncode
            with self._count:
                self._running -= 1
                if code:
                    self.failed.append(number)
            said = "end" if code == 0 else f"FAILED ({code})"
            print(
                f"{time.strftime('%H:%M:%S')} GPU {gpu}  {said} {number} after {time.monotonic() - begin:.0f} s",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("queue", type=Path)
    parser.add_argument("--gpus", nargs="+", default=["0"])
    parser.add_argument("--workers", type=int, default=1, help="processes of a GPU")
    parser.add_argument("--minutes", type=float, help="in which all that begins is to end")
    parser.add_argument("--logs", type=Path, default=Path("run_queue_logs"))
    args = parser.parse_args()
    failed = Workers(Queue(args.queue, Deadline(args.minutes)), args.gpus, args.workers, args.logs).run()
    if failed:
        raise SystemExit(f"failed: lines {', '.join(map(str, failed))}; see {args.logs}")


if __name__ == "__main__":
    main()
