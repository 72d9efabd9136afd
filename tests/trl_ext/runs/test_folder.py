"""What a process that was killed has left in the folder of its run."""

import json
import os

import pytest

from trl_ext.runs.folder import last_checkpoint, only_run, require_same_settings, write_whole


def test_the_last_checkpoint_is_the_newest_that_is_whole(tmp_path):
    assert last_checkpoint(tmp_path / "none") is None and last_checkpoint(tmp_path) is None
    for name, state in (("9", "{}"), ("10", "{}"), ("11", None), ("12", ""), ("13", '{"epoch": 1'), ("14-old", "{}")):
        checkpoint = tmp_path / f"checkpoint-{name}"
        checkpoint.mkdir()
        (checkpoint / "model.safetensors").write_text("weights")
        if state is not None:
            (checkpoint / "trainer_state.json").write_text(state)
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-10"


def test_settings_that_differ_are_named_entry_by_entry_and_hashes_in_words(tmp_path):
    file, begun = tmp_path / "run.json", {"seed": 0, "stage": {"steps": 2, "rate": 1e-3}, "text": "0d46"}
    require_same_settings(file, begun, "--output")
    write_whole(file, begun)
    require_same_settings(file, begun, "--output", {"text": "contents of --data"})
    other = {"seed": 1, "stage": {"steps": 3, "rate": 1e-3, "mix": None}, "text": "0d47"}
    with pytest.raises(ValueError) as error:
        require_same_settings(file, other, "--output", {"text": "contents of --data"})
    assert str(error.value) == (
        f"{tmp_path} holds a run with other settings: seed 0 there and 1 here, stage: steps 2 there and 3 here, "
        "stage: mix not set there and None here, contents of --data changed. Use another --output."
    )


def test_a_file_of_a_run_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    file = tmp_path / "run.json"
    write_whole(file, {"step": "one"})
    before = file.read_text()
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(OSError, match="No space left"):
            write_whole(file, {"step": "two"})
    assert file.read_text() == before and os.listdir(tmp_path) == ["run.json"]
    write_whole(file, {"step": "three"})
    assert json.loads(file.read_text()) == {"step": "three"}


def test_of_two_runs_that_begin_at_once_one_has_the_folder(tmp_path):
    file = tmp_path / "log.txt"
    with only_run(file, "--output"):
        message = f"{tmp_path} is in use: another process writes there. .* another --output"
        with pytest.raises(ValueError, match=message), only_run(file, "--output"):
            pass
    with only_run(file, "--output"):
        pass


def full(*_):
    raise OSError(28, "No space left on device")
