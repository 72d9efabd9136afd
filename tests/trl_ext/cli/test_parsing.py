"""A mistake on the command line is one line with the nearest name."""

import argparse

import pytest

from trl_ext.cli.console import _parser
from trl_ext.cli.parsing import CommandParser, hint


@pytest.fixture
def parser():
    made = CommandParser(prog="tool")
    commands = made.add_subparsers(dest="command", required=True, metavar="COMMAND")
    draw = commands.add_parser("draw")
    draw.add_argument("--colour", choices=["red", "blue"])
    draw.add_argument("--width", type=int)
    draw.set_defaults(run="drawn")
    commands.add_parser("pass", forwards=True).set_defaults(run="passed")
    return made


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["darw"], "tool: there is no command darw. Did you mean draw? There are draw, pass. tool --help explains it."),
        ([], "tool: the following arguments are required: COMMAND. tool --help explains it."),
        (["draw", "--color", "red"], "tool draw: there is no flag --color. Did you mean --colour? tool draw --help"),
        (["draw", "--col", "red"], "tool draw: there is no flag --col. Did you mean --colour?"),
        (["draw", "--zzz"], "tool draw: there is no flag --zzz. tool draw --help explains it."),
        (["draw", "red"], "tool draw: 'red' belongs to no flag. tool draw --help"),
        (["draw", "--width", "wide"], "tool draw: --width: invalid int value: 'wide'. tool draw --help"),
        (["draw", "--colour", "green"], "tool draw: --colour: invalid choice: 'green' (choose from"),
    ],
)
def test_a_mistake_is_one_line_and_ends_with_2(typed, said, parser, capsys):
    with pytest.raises(SystemExit) as end:
        parser.parse_args(typed)
    printed = capsys.readouterr()
    assert end.value.code == 2 and not printed.out
    assert printed.err.startswith(said) and printed.err.count("\n") == 1


def test_what_is_right_is_parsed(parser):
    assert parser.parse_args(["draw", "--width", "3"]) == argparse.Namespace(
        command="draw", colour=None, width=3, run="drawn"
    )


def test_a_parser_that_forwards_keeps_all_but_help(parser, capsys):
    typed = ["a.yaml", "--any", "3", "--command", "draw"]
    assert parser.parse_args(["pass", *typed]) == argparse.Namespace(command="pass", run="passed", arguments=typed)
    with pytest.raises(SystemExit) as end:
        parser.parse_args(["pass", "--any", "--help"])
    assert not end.value.code and "usage: tool pass" in capsys.readouterr().out


def test_a_hint_is_a_question():
    assert hint("--modle", ["--model", "--rows"]) == " Did you mean --model?"
    assert not hint("xyz", ["--model"])


SEVERAL = [
    ("extend base --to 9 --output out --data a.txt", "data"),
    ("extend base --to 9 --output out --data a.txt --held-out a.txt", "held_out"),
    ("rows base --output rows.jsonl --text a.txt", "text"),
    ("eval --model base --text a.txt", "text"),
    ("eval --model base --ruler-tasks a.txt", "ruler_tasks"),
    ("eval --model base --benchmarks a.txt", "benchmarks"),
    ("probe --model base --text a.txt", "text"),
]


@pytest.mark.parametrize(("typed", "name"), SEVERAL, ids=[f"{typed.split()[0]} {name}" for typed, name in SEVERAL])
def test_files_that_a_flag_names_in_two_places_are_all_taken(typed, name):
    """argparse keeps those of the last place, and says nothing of the others."""
    flag = f"--{name.replace('_', '-')}"
    assert getattr(_parser().parse_args([*typed.split(), flag, "b.txt", "c.txt"]), name) == ["a.txt", "b.txt", "c.txt"]


@pytest.mark.parametrize("typed", ["extend base --to 9 --output out --data a.txt", "eval --model base"])
def test_lengths_in_two_places_are_all_taken_and_nothing_is_kept_for_the_next_call(typed):
    for _ in range(2):
        told = _parser().parse_args([*typed.split(), "--lengths", "5", "--lengths", "6", "7"])
        assert told.lengths == [5, 6, 7]
