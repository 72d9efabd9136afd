"""Checkpoints with Python code of their own: nothing runs it, or asks for it, unless the user said so."""

import pytest
from support.own_code import save_with_own_code

from rope_patch import export, patch_model
from rope_patch.base.remote_code import load_pretrained
from rope_patch.checkpoints.checked_loading import load_checkpoint


@pytest.fixture
def folder(tmp_path, monkeypatch):
    def asked(*_):
        raise AssertionError("the terminal is not asked")

    monkeypatch.setattr("builtins.input", asked)
    save_with_own_code(tmp_path / "own")
    return tmp_path / "own"


def test_code_of_a_checkpoint_does_not_run(folder):
    with pytest.raises(ValueError, match="own comes with Python code of its own .* Read it; then train"):
        load_checkpoint(folder)
    with pytest.raises(ValueError, match="comes with Python code"):
        export(folder, folder.parent / "out")
    assert not (folder.parent / "out").exists()


def test_code_runs_where_the_user_says_so(folder):
    model = load_checkpoint(folder, trust_remote_code=True)
    assert type(model).__name__ == "OwnModel"
    patch_model(model, "yarn", factor=2.0)
    with pytest.raises(
        ValueError, match="OwnModel comes with Python code .*: write the model and its code with save_pretrained"
    ):
        export(model, folder.parent / "out")
    model.save_pretrained(folder.parent / "saved")
    again = load_checkpoint(folder.parent / "saved", trust_remote_code=True)
    assert again.config.rope_parameters["rope_type"] == "yarn"


def test_another_error_stays_what_it_is():
    class Auto:
        @classmethod
        def from_pretrained(cls, name, trust_remote_code):
            raise ValueError("no config")

    with pytest.raises(ValueError, match=r"^no config$"):
        load_pretrained(Auto, "model")
