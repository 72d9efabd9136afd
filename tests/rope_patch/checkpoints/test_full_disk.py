"""A disk that is full, as Python, safetensors and torch tell of it."""

import errno
import re
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from rope_patch.checkpoints.full_disk import FullDisk, disk_full_errors, whole_file
from rope_patch.export.writing import whole_folder

FULL = Path("/dev/full")  # takes a file's place, and no byte
ERRORS = [
    OSError(errno.ENOSPC, "No space left on device", "out/config.json"),
    OSError(errno.EDQUOT, "Disk quota exceeded"),
    SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed"),
    RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534"),
]


def what_to_do():
    return "Do this."


@pytest.mark.parametrize("error", ERRORS, ids=["python", "quota", "safetensors", "torch", "torch at the end"])
def test_the_folder_and_what_to_do_are_told(error, tmp_path):
    folder = tmp_path / "not/there"
    message = rf"^{folder} could not be written, on a disk with [\d.]+ GB free: {re.escape(str(error))}. Do this.$"
    with pytest.raises(FullDisk, match=message) as told, disk_full_errors(folder, what_to_do):
        raise error
    assert told.value.__cause__ is error
    with pytest.raises(FullDisk, match=message), disk_full_errors(tmp_path, what_to_do):
        with disk_full_errors(folder, what_to_do):
            raise error
    with pytest.raises(FullDisk, match=message), disk_full_errors(folder, what_to_do):
        try:
            raise error
        finally:
            raise RuntimeError("of a library that closes its file")


class OfRanks(BaseException):
    """As torch.distributed.checkpoint has one, which holds what each rank printed."""


def test_an_error_that_holds_the_traceback_of_a_rank_is_told_in_one_line(tmp_path):
    error = OfRanks("ranks: [0]\nTraceback (most recent call last):\nOSError: [Errno 28] No space left on device\n")
    with pytest.raises(FullDisk, match=r"GB free: OSError: \[Errno 28\] No space left on device. Do this.$"):
        with disk_full_errors(tmp_path, what_to_do):
            raise error


@pytest.mark.parametrize(
    "error",
    [ValueError("no"), RuntimeError("CUDA error"), PermissionError(13, "denied"), KeyboardInterrupt()],
    ids=repr,
)
def test_other_errors_stay_as_they_are(error, tmp_path):
    with pytest.raises(type(error)) as raised, disk_full_errors(tmp_path, lambda: pytest.fail("asked")):
        raise error
    assert raised.value is error


@pytest.mark.skipif(not FULL.is_char_device(), reason="this system has no /dev/full")
@pytest.mark.parametrize("n", [1, 1_000_000])
def test_what_torch_and_python_raise_is_known(n, tmp_path):
    (tmp_path / "file").symlink_to(FULL)
    with pytest.raises(FullDisk), disk_full_errors(tmp_path, what_to_do):
        torch.save({"a": torch.zeros(n)}, tmp_path / "file")
    with pytest.raises(FullDisk), disk_full_errors(tmp_path, what_to_do):
        (tmp_path / "file").write_text("a" * n)


def test_a_folder_that_is_not_whole_is_not_there(tmp_path):
    message = rf"^{tmp_path}/out could not be written, .* Free some space, and run the same again\.$"
    with pytest.raises(FullDisk, match=message), whole_folder(tmp_path / "out") as written:
        (written / "config.json").write_text("{}")
        raise ERRORS[2]
    assert not list(tmp_path.iterdir())


def test_a_file_is_whole_or_as_it_was(tmp_path):
    file = tmp_path / "a.json"
    with whole_file(file) as first, whole_file(file) as second:
        first.write_text("first")
        second.write_text("second")
        assert not file.exists()
    assert file.read_text() == "first", "which is done last"
    message = rf"^{file} could not be written, .* Free some space, and run the same again\.$"
    with pytest.raises(FullDisk, match=message), whole_file(file) as beside:
        beside.write_text("half")
        raise ERRORS[1]
    with pytest.raises(KeyboardInterrupt), whole_file(file) as beside:
        beside.write_text("half")
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == [file] and file.read_text() == "first"
