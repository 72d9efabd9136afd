"""The command line as a whole."""

import re
import subprocess
import sys

import pytest

from rope_patch import __version__
from trl_ext import cli
from trl_ext.cli.console import _parser

COMMANDS = sorted(_parser()._commands())


def test_every_command_is_there():
    assert set(COMMANDS) >= {"check", "demo", "eval", "export", "methods", "probe", "rows", "status", "train"}


def test_the_version_is_that_of_the_package(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"rope-patch {__version__}\n"


def test_python_m_trl_ext_is_the_same_command_line():
    done = subprocess.run([sys.executable, "-m", "trl_ext", "trian"], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("rope-patch: there is no command trian. Did you mean train?")


def test_every_command_says_what_it_does(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    said = capsys.readouterr().out
    for name in COMMANDS:
        assert re.search(rf"\n    {name}(  +|\n {{10,}})[a-z]", said), name  # a long name has its help in the next line


@pytest.mark.parametrize("command", ["extend", "eval", "export"])
def test_a_command_of_one_process_is_not_launched_on_several(command, monkeypatch, capsys):
    given = {
        "extend": ["model", "--to", "128", "--data", "text.txt", "--output", "out"],
        "eval": ["--model", "model"],
        "export": ["model", "--output", "out", "--target", "vllm"],
    }
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert cli.main([command, *given[command]]) == 2
    assert f"rope-patch {command} runs in one process, and a launcher has started 2" in capsys.readouterr().err
