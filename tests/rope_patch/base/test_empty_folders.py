"""What a refused run leaves of folders."""

import pytest

from rope_patch.base.empty_folders import without_empty_folders


def test_a_folder_that_a_refused_run_made_goes_and_no_other(tmp_path):
    new, old = tmp_path / "new", tmp_path / "old"
    old.mkdir()
    for folder in (new, old):
        with pytest.raises(ValueError, match="refused"), without_empty_folders(folder):
            folder.mkdir(exist_ok=True)
            raise ValueError("refused")
    assert old.is_dir() and not new.exists()
    with pytest.raises(KeyboardInterrupt), without_empty_folders(new):
        new.mkdir()
        (new / "cache.json").write_text("measured")
        raise KeyboardInterrupt
    assert (new / "cache.json").is_file(), "what is there stays"
    with without_empty_folders(tmp_path / "made"):
        (tmp_path / "made").mkdir()
    assert (tmp_path / "made").is_dir()
    with pytest.raises(ValueError, match="refused"), without_empty_folders(tmp_path / "none"):
        raise ValueError("refused")


def test_folders_around_it_that_were_made_go_too(tmp_path):
    with pytest.raises(ValueError, match="refused"), without_empty_folders(tmp_path / "a" / "b"):
        (tmp_path / "a" / "b").mkdir(parents=True)
        raise ValueError("refused")
    assert not list(tmp_path.iterdir())
