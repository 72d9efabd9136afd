"""The queue of commands: conditions, shares of a GPU, what fails."""

import os
import sys
import threading
from pathlib import Path

import pytest
import torch

from result_lines import Deadline
from rope_kernels.common.gpu_memory import free_gpu_bytes
from run_queue import GPU_SHARE, Command, Queue

PYTHON = sys.executable


def written(file, lines):
    file.write_text("\n".join(lines) + "\n")
    return Queue(file, Deadline(1), file.parent / "logs")


def test_a_line_has_conditions_and_a_command():
    line = "needs=a/b seconds=12.5 python run.py --arms 'fixed skip' needs=x"
    assert Command.of(line) == Command(("python", "run.py", "--arms", "fixed skip", "needs=x"), Path("a/b"), 12.5)
    assert Command.of("ls") == Command(("ls",))
    assert Command.of("limit=2.5 seconds=2 ls") == Command(("ls",), None, 2.0, 2.5)
    with pytest.raises(ValueError, match="must have a command behind its conditions, got 'seconds=3'"):
        Command.of("seconds=3")


def test_what_needs_a_file_waits_for_the_command_that_writes_it(tmp_path):
    made, copied = tmp_path / "made", tmp_path / "copied"
    tell = f"import os, time; time.sleep(0.5); open('{made}', 'w').write(os.environ['CUDA_VISIBLE_DEVICES'])"
    write = f'{PYTHON} -c "{tell}"'
    read = f"needs={made} {PYTHON} -c \"open('{copied}', 'w').write(open('{made}').read())\""
    queue = written(tmp_path / "queue", [read, "", write])
    assert queue.run(["7"], 2) == []
    assert copied.read_text() == "7"


def test_processes_of_a_gpu_have_parts_of_its_memory(tmp_path, monkeypatch):
    queue = written(tmp_path / "queue", [f"{PYTHON} -c \"import os; print(os.environ['{GPU_SHARE}'])\""])
    assert queue.run(["0"], 3) == [] and GPU_SHARE not in os.environ
    share = float((tmp_path / "logs/000.log").read_text())
    assert share == pytest.approx(0.95 / 3)
    # what they then plan with: their own part, or less where others hold more
    total, taken = 100 << 30, []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda index: {2: share}[index])
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: sum(taken))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (80 << 30, total))
    for device in (None, torch.device("cuda"), torch.device("cuda", 2)):
        assert free_gpu_bytes(device) == int(share * total)
    taken.append(20 << 30)
    assert free_gpu_bytes() == int(share * total) - (20 << 30)
    taken.append(20 << 30)
    assert free_gpu_bytes() == 0
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (1 << 30, total))
    taken.clear()
    assert free_gpu_bytes() == 1 << 30


def test_what_cannot_begin_ends_the_queue_and_what_failed_is_told(tmp_path):
    lines = [f"{PYTHON} -c 'raise SystemExit(3)'", "needs=/nowhere ls", "seconds=3600 ls", "echo seen"]
    assert written(tmp_path / "queue", lines).run(["0", "1"], 1) == [0]
    assert sorted(f.name for f in (tmp_path / "logs").iterdir()) == ["000.log", "003.log"]
    assert (tmp_path / "logs/003.log").read_text() == "seen\n"


def test_a_line_that_cannot_be_read_is_told(tmp_path):
    with pytest.raises(ValueError, match="must have a command behind its conditions"):
        written(tmp_path / "queue", ["seconds=3"]).run(["0"], 2)


def test_a_queue_that_stays_takes_what_comes_later(tmp_path):
    """A file that another process writes, and a line that is added when all others are done."""
    file, made = tmp_path / "queue", tmp_path / "made"
    file.write_text(f"needs={made} echo found\n")
    threading.Timer(0.5, made.touch).start()
    threading.Timer(1.0, lambda: file.write_text(f"{file.read_text()}echo added\n")).start()
    assert Queue(file, Deadline(2.5 / 60), tmp_path / "logs", stay=True).run(["0"], 2) == []
    assert [(tmp_path / f"logs/{n}.log").read_text() for n in ("000", "001")] == ["found\n", "added\n"]


def test_a_command_that_hangs_is_ended_and_tells_where_it_stands(tmp_path):
    (tmp_path / "waits.py").write_text("import time\n\ndef stuck():\n    time.sleep(60)\n\nstuck()\n")
    queue = written(tmp_path / "queue", [f"limit=1.5 {PYTHON} {tmp_path / 'waits.py'}", "echo next"])
    assert queue.run(["0"], 1) == [0]
    assert "in stuck" in (tmp_path / "logs/000.log").read_text()
    assert (tmp_path / "logs/001.log").read_text() == "next\n"


def test_one_that_takes_longer_than_was_said_goes_on(tmp_path):
    takes = "import time; time.sleep(0.6); print('through')"
    queue = written(tmp_path / "queue", [f'seconds=0.05 {PYTHON} -c "{takes}"'])
    assert queue.run(["0"], 1) == []
    assert (tmp_path / "logs/000.log").read_text() == "through\n"
