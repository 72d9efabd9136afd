"""A base model is named by its id on the hub or by its folder's name, and never by a path."""

import pytest

from rope_patch.model_card import BaseModel


def test_a_folder_is_named_without_its_path(tmp_path):
    folder = tmp_path / "somewhere" / "base"
    folder.mkdir(parents=True)
    assert BaseModel.of(str(folder)) == BaseModel("base", is_on_hub=False)
    assert BaseModel.of(str(tmp_path / "gone" / "base")) == BaseModel("base", is_on_hub=False)


def test_a_relative_folder_is_no_id(tmp_path, monkeypatch):
    (tmp_path / "out" / "base").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert BaseModel.of("out/base") == BaseModel("base", is_on_hub=False)
    assert BaseModel.of("out/other") == BaseModel("out/other", is_on_hub=True)


@pytest.mark.parametrize(
    ("given", "name", "is_on_hub"),
    [
        ("owner/model", "owner/model", True),
        ("/cache/models--owner--model/snapshots/0123abc", "owner/model", True),
        ("out/runs/base", "base", False),  # an id has one slash at most
    ],
)
def test_ids_are_told_from_paths(given, name, is_on_hub):
    assert BaseModel.of(given) == BaseModel(name, is_on_hub)


def test_a_revision_is_of_a_model_on_the_hub(tmp_path):
    base = BaseModel.of("owner/model", "v1")
    assert base == BaseModel("owner/model", True, revision="v1") and BaseModel.from_dict(base.to_dict()) == base
    assert BaseModel.of("owner/model", "main") == BaseModel.of("owner/model") == BaseModel("owner/model", True)
    assert BaseModel.of(str(tmp_path), "v1").revision == ""
    earlier = {"name": "owner/model", "is_on_hub": True}
    assert BaseModel.from_dict(earlier).revision == "", "a record of before there were revisions"


def test_a_model_that_was_loaded_from_nowhere_has_no_base():
    assert BaseModel.of("") is None


@pytest.mark.parametrize(
    ("page", "license"),
    [("---\nlicense: apache-2.0\n---\n# Base\n", "apache-2.0"), ("# Base\n", ""), ("---\n[: {\n---\n", "")],
)
def test_the_license_is_that_of_the_base_models_card(page, license, tmp_path):
    (tmp_path / "README.md").write_text(page)
    base = BaseModel.of(str(tmp_path))
    assert base.license == license
    assert BaseModel.from_dict(base.to_dict()) == base
