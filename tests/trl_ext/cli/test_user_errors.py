"""Mistakes of users are one line; errors of the program keep their traceback."""

import warnings

import pytest
import torch

from trl_ext.cli.user_errors import run_command


def raising(error):
    def run():
        raise error

    return run


@pytest.mark.parametrize("error", [ValueError("a\n  b"), OSError("a b"), ImportError("a b")])
def test_a_mistake_is_one_line_and_ends_with_2(error, capsys):
    assert run_command("tool", raising(error)) == 2
    assert capsys.readouterr().err == "tool: a b (ROPE_PATCH_TRACEBACK=1 shows where this comes from.)\n"


@pytest.mark.parametrize(
    "error", [TypeError("x"), KeyError("x"), AttributeError("x"), RuntimeError("x"), AssertionError()]
)
def test_an_error_of_the_program_is_raised(error, capsys):
    with pytest.raises(type(error)):
        run_command("tool", raising(error))
    assert not capsys.readouterr().err


def test_too_little_memory_is_a_matter_of_the_run(capsys):
    assert run_command("tool", raising(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate ..."))) == 2
    assert "tool: the GPU has too little memory: take shorter rows" in capsys.readouterr().err


def test_the_traceback_is_shown_on_request(monkeypatch):
    monkeypatch.setenv("ROPE_PATCH_TRACEBACK", "1")
    with pytest.raises(ValueError, match="x"):
        run_command("tool", raising(ValueError("x")))


def test_what_libraries_are_to_change_is_not_told(recwarn):
    def run():
        warnings.warn("gone in v6", FutureWarning, stacklevel=1)
        warnings.warn("of use to the user", UserWarning, stacklevel=1)
        return 3

    assert run_command("tool", run) == 3
    assert [str(w.message) for w in recwarn] == ["of use to the user"]
