"""What a process that was killed has left in the folder of its run."""

import json
import os

import pytest

from trl_ext.run_folder import Stopwatch, last_checkpoint, record_settings


def test_the_last_checkpoint_is_the_newest_that_is_whole(tmp_path):
    assert last_checkpoint(tmp_path / "none") is None and last_checkpoint(tmp_path) is None
    for name, state in (("9", "{}"), ("10", "{}"), ("11", None), ("12", ""), ("13", '{"epoch": 1'), ("14-old", "{}")):
        checkpoint = tmp_path / f"checkpoint-{name}"
        checkpoint.mkdir()
        (checkpoint / "model.safetensors").write_text("weights")
        if state is not None:
            (checkpoint / "trainer_state.json").write_text(state)
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-10"


@pytest.mark.parametrize("kind", ["settings", "seconds"])
def test_a_file_of_a_run_is_written_whole_or_not_at_all(kind, tmp_path, monkeypatch):
    file = tmp_path / "run.json"

    def write(value):
        if kind == "settings":
            record_settings(file, {"step": value})
        else:
            with Stopwatch(file)(value):
                pass

    write("one")
    before = file.read_text()
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(OSError, match="No space left"):
            write("two")
    assert file.read_text() == before and os.listdir(tmp_path) == ["run.json"]
    write("three")
    assert "three" in json.dumps(json.loads(file.read_text()))


def full(*_):
    raise OSError(28, "No space left on device")
