"""What a process that was killed has left in the folder of its run."""

import json
import os

import pytest

from trl_ext.run_folder import Stopwatch, last_checkpoint, record_settings, require_same_settings


def test_the_last_checkpoint_is_the_newest_that_is_whole(tmp_path):
    assert last_checkpoint(tmp_path / "none") is None and last_checkpoint(tmp_path) is None
    for name, state in (("9", "{}"), ("10", "{}"), ("11", None), ("12", ""), ("13", '{"epoch": 1'), ("14-old", "{}")):
        checkpoint = tmp_path / f"checkpoint-{name}"
        checkpoint.mkdir()
        (checkpoint / "model.safetensors").write_text("weights")
        if state is not None:
            (checkpoint / "trainer_state.json").write_text(state)
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-10"


def test_settings_that_differ_are_told_entry_by_entry_and_hashes_in_words(tmp_path):
    file, begun = tmp_path / "run.json", {"seed": 0, "stage": {"steps": 2, "rate": 1e-3}, "text": "0d46"}
    require_same_settings(file, begun, "--output")
    record_settings(file, begun)
    require_same_settings(file, begun, "--output", {"text": "contents of --data"})
    other = {"seed": 1, "stage": {"steps": 3, "rate": 1e-3, "mix": None}, "text": "0d47"}
    with pytest.raises(ValueError) as error:
        require_same_settings(file, other, "--output", {"text": "contents of --data"})
    assert str(error.value) == (
        f"{tmp_path} holds a run with other settings: seed 0 there and 1 here, stage: steps 2 there and 3 here, "
        "stage: mix not set there and None here, contents of --data changed. Use another --output."
    )


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
