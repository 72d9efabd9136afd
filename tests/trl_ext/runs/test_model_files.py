"""Which commit a model on the hub is, and which one a run was begun with."""

import pytest
from support.hub import publish, use_cache

from trl_ext.runs.model_files import commit_of, recorded_commit


def config(folder):
    (folder / "config.json").write_text("{}")


def config_in_subfolder(folder):
    (folder / "part").mkdir()
    config(folder / "part")


def test_the_commit_is_read_in_the_cache(tmp_path, monkeypatch):
    use_cache(monkeypatch, tmp_path / "hub")
    publish(tmp_path / "hub", "owner/base", main=config, dev=config)
    publish(tmp_path / "other", "owner/parts", first=config, v1=config_in_subfolder)
    first, second = "0" * 40, f"{1:040x}"
    assert commit_of("owner/base", None) == commit_of("owner/base", "main") == first
    assert commit_of("owner/base", "dev") == commit_of("owner/base", second) == second
    assert commit_of("owner/base", "v1") is None and commit_of("owner/parts", "v1") is None
    assert commit_of("owner/parts", "v1", cache_dir=str(tmp_path / "other"), subfolder="part") == second
    assert commit_of(str(tmp_path), "main") is None


@pytest.mark.parametrize(
    ("name", "revision", "commit"), [("a/b", "dev", "abc"), ("a/c", "dev", None), ("a/b", None, None)]
)
def test_a_run_that_was_begun_with_another_model_or_revision_says_no_commit(name, revision, commit):
    begun = {"model": "a/b", "model_revision": "dev", "model_commit": "abc"}
    assert recorded_commit(begun, name, revision) == commit
    assert recorded_commit({}, name, revision) is None
