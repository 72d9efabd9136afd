"""Names that lead to no checkpoint are refused, each for its reason."""

import json

import pytest
from support.tiny import tiny

from trl_ext.runs.checkpoint import base_of_adapter, require_checkpoint, require_no_adapter


@pytest.fixture
def adapter(tmp_path):
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "base"}))
    return folder


def test_the_config_of_a_checkpoint_is_read(tmp_path):
    tiny().save_pretrained(tmp_path)
    assert require_checkpoint(str(tmp_path), "--model").model_type == "llama"
    require_no_adapter(str(tmp_path), "--model")
    assert base_of_adapter(tmp_path) is None


def test_an_adapter_is_not_taken_for_a_model(adapter):
    assert base_of_adapter(adapter) == "base"
    with pytest.raises(ValueError, match=f"--model: {adapter} is an adapter of base, not a model. `rope-patch export"):
        require_no_adapter(str(adapter), "--model")


@pytest.mark.parametrize(
    ("config", "message"), [("{}", "adapter_config.json names no base model"), ("{", "adapter_config.json is no JSON")]
)
def test_an_adapter_that_names_no_model_is_refused(config, message, adapter):
    (adapter / "adapter_config.json").write_text(config)
    with pytest.raises(ValueError, match=message):
        base_of_adapter(adapter)


def test_a_model_that_was_saved_with_its_adapter_is_a_model(adapter):
    tiny().save_pretrained(adapter)
    require_no_adapter(str(adapter), "--model")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("empty", "--model: empty is a folder without config.json: it holds no checkpoint."),
        ("file", "--model: file is a file: name the folder of the checkpoint, or a hub id."),
        ("nowhere/model", "--model: nowhere/model is no folder with a checkpoint, and from the hub: "),
    ],
)
def test_what_leads_to_no_checkpoint_is_refused(name, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(ValueError) as error:
        require_checkpoint(name, "--model")
    assert str(error.value).startswith(message)


@pytest.mark.parametrize("name", ["nowhere", "./nowhere", "nowhere/", "~/nowhere", "a/path/to/nowhere", "no folder"])
def test_the_hub_is_not_asked_for_what_can_be_no_id_there(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", lambda *_, **__: pytest.fail("the hub is asked"))
    with pytest.raises(ValueError) as error:
        require_checkpoint(name, "--model")
    assert str(error.value) == (
        f"--model: there is no folder {name}, and a hub id has the form OWNER/NAME. Check the name and the current "
        "folder."
    )
