"""What docs/evaluation.md shows runs: its Python as it stands, on shorter rows, and its commands through the parser."""

import re
import shlex
from pathlib import Path

from support.characters import CHARACTERS, character_tokenizer
from support.tiny import tiny

from trl_ext import cli
from trl_ext.cli.console import _parser
from trl_ext.cli.model_spec import ModelSpec

PAGE = (Path(__file__).parents[3] / "docs" / "evaluation.md").read_text()


def blocks(language):
    code = re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    assert code
    return code


def test_every_python_block_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    documents = ["It was a dark night. The wind blew! Who was there? " * 40] * 8
    known = {
        "model": tiny(vocab_size=CHARACTERS),
        "tuned": tiny(vocab_size=CHARACTERS),
        "tokenizer": character_tokenizer(),
        "documents": documents,
    }
    for block in blocks("python"):
        # the page's lengths are for a real model
        exec(block.replace("32768", "900").replace("4096", "700"), known)  # noqa: S102
    assert (tmp_path / "cliff.png").is_file() and (tmp_path / "cliff.svg").is_file()
    assert "900 tokens" in capsys.readouterr().out


def test_every_command_is_one():
    commands = [line for block in blocks("sh") for line in block.replace("\\\n", " ").splitlines()]
    ours = [shlex.split(line)[1:] for line in commands if line.startswith("rope-patch ")]
    assert len(ours) >= 2
    for arguments in ours:
        args = _parser().parse_args(arguments)
        for model in [args.model] if isinstance(args.model, str) else args.model:
            ModelSpec.parse(model)


def test_every_flag_of_eval_is_explained_in_words():
    import contextlib
    import io

    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        cli.main(["eval", "--help"])
    text = " ".join(out.getvalue().split())
    for flag, words in {
        "--cliff": "loss at every position of a text",
        "--gain": "the whole text instead of its last 512 tokens",
        "--passkey": "five-digit number",
        "--niah": "needle in a haystack",
        "--ruler": "RULER's 13 long-context tasks",
        "--view-kl": "how much the predictions change",
    }.items():
        assert re.search(rf"{flag} [^-]*{re.escape(words)}", text), flag
