"""What other packages print is kept from the terminal, and ends up in a file."""

import logging
import warnings

import pytest
import transformers

from trl_ext.extension.messages import others_quiet


def warn_from(filename):
    warnings.warn_explicit("look out", UserWarning, filename, 1)


def test_messages_before_and_after_the_file_is_named_are_written(tmp_path, capsys):
    file = tmp_path / "log.txt"
    with others_quiet() as messages:
        logging.getLogger("another.package").warning("first")
        assert not file.exists()
        messages.write_to(file)
        transformers.logging.get_logger("transformers.models").warning("second")
        warn_from("/site-packages/another/module.py")
    lines = file.read_text().splitlines()
    assert [line.partition(": ")[2] for line in lines[:2]] == ["first", "second"]
    assert "another/module.py:1: UserWarning: look out" in lines[2] and len(lines) == 3
    assert capsys.readouterr() == ("", "")


def test_warnings_of_this_project_are_shown():
    with pytest.warns(UserWarning, match="look out"), others_quiet():
        warn_from("/site-packages/rope_patch/patch.py")


def test_all_is_as_before_after_the_block():
    root, logger = logging.getLogger(), logging.getLogger("transformers")
    transformers.logging.enable_progress_bar()
    before = list(root.handlers), list(logger.handlers), logger.propagate, warnings.showwarning
    with others_quiet():
        assert not transformers.logging.is_progress_bar_enabled()
    assert (list(root.handlers), list(logger.handlers), logger.propagate, warnings.showwarning) == before
    assert transformers.logging.is_progress_bar_enabled()
