"""Runs of a study: done once, in time, each for itself."""

import argparse
from functools import partial

import pytest

import harness
from harness import Run
from result_lines import add_line, read_lines


@pytest.fixture
def args(tmp_path):
    return given(f"--out {tmp_path}/out.jsonl")


def given(line):
    return harness.study_parser("a study", "study.jsonl").parse_args(line.split())


def run(arm, results=lambda: [{"loss": 1.0}], alike=None):
    return Run(arm, {"arm": arm, "seed": 0}, results, alike)


def names(args):
    return [line["arm"] for line in read_lines(args.out)]


carry_out = partial(harness.carry_out, shown=lambda line: f"loss {line['loss']}")


def test_a_line_says_what_it_was_made_with_and_is_not_made_again(args, capsys):
    for _ in range(2):
        carry_out([run("a"), run("b")], args)
    first, second = read_lines(args.out)
    assert (first["arm"], first["seed"], first["loss"], second["arm"]) == ("a", 0, 1.0, "b")
    assert first["seconds"] >= 0 and {"torch", "transformers", "trl"} <= first["versions"].keys() and "gpu" in first
    assert capsys.readouterr().out.splitlines() == ["a  loss 1.0  0 s", "b  loss 1.0  0 s"]


def test_a_run_that_fails_leaves_the_others_and_the_exit_status_is_1(args, capsys):
    def fails():
        yield {"loss": 2.0, "after": "first"}
        raise RuntimeError("not this one")

    stages = Run("a", {"arm": "a", "after": "last"}, fails)
    with pytest.raises(SystemExit, match="failed: a") as end:
        carry_out([stages, run("b")], args)
    assert isinstance(end.value.code, str)  # which Python prints, and ends with 1
    assert "not this one" in capsys.readouterr().err
    # what the first stage gave is kept, and the run is not taken for done
    assert names(args) == ["a", "b"]
    with pytest.raises(SystemExit):
        carry_out([stages, run("b")], args)
    assert names(args) == ["a", "b", "a"]


def test_no_run_begins_that_would_not_be_through(args, tmp_path, capsys):
    add_line(args.out, {"arm": "slow", "seed": 1, "seconds": 90.0})
    add_line(args.out, {"arm": "quick", "seed": 1, "seconds": 5.0})
    timed = given(f"--minutes 1 --out {args.out}")
    runs = [run(arm, alike={"arm": arm}) for arm in ("quick", "slow", "after")]
    assert runs[2].seconds(read_lines(args.out)) == 90  # of all, where none is alike
    carry_out(runs, timed)
    assert names(args) == ["slow", "quick", "quick"]
    assert "slow: not begun, it would take 90 s" in capsys.readouterr().out


def test_one_that_ends_by_itself_begins_until_time_is_up(args):
    add_line(args.out, {"arm": "before", "seconds": 90.0})
    carry_out([run("a")], given(f"--minutes 1 --out {args.out}"))
    carry_out([run("b")], given(f"--minutes 0 --out {args.out}"))
    assert names(args) == ["before", "a"]


def test_parts_do_all_runs_between_them(args):
    for part in ("1/2", "0/2"):
        carry_out([run(arm) for arm in "abc"], given(f"--part {part} --out {args.out}"))
    assert names(args) == ["b", "a", "c"]


def test_unknown_arms_are_refused_before_anything_is_loaded(capsys):
    parser = argparse.ArgumentParser()
    assert harness.chosen(parser, given(""), ["a", "b"]) == ["a", "b"]
    assert harness.chosen(parser, given(""), ["a", "b"], ["b"]) == ["b"]
    assert harness.chosen(parser, given("--arms a"), ["a", "b"], ["b"]) == ["a"]
    with pytest.raises(SystemExit):
        harness.chosen(parser, given("--arms a c"), ["a", "b"])
    assert "unknown arms c; known: a, b" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        harness.require(parser, argparse.Namespace(model="m", text=None), "model", "text")
    assert "without --table these are needed: text" in capsys.readouterr().err


def test_a_table_is_of_the_arms_that_are_named(args, capsys):
    for line in ({"arm": "native"}, {"arm": "a"}, {"method": "b"}):
        add_line(args.out, line)
    for arms, shown in (("", 3), ("--arms a", 2), ("--arms b", 2)):
        harness.show(given(f"--table {args.out} {arms}"), lambda lines: str(len(lines)), None)
        assert capsys.readouterr().out == f"{shown}\n"


def test_fields_that_a_study_sets_are_not_overridden(capsys):
    parser = harness.study_parser("a study", "study.jsonl")
    harness.add_training_arguments(parser, "max_steps")
    assert parser.parse_args(["--override", '{"warmup_steps": 0}']).override == {"warmup_steps": 0}
    for field in ("seed", "max_steps"):
        with pytest.raises(SystemExit):
            parser.parse_args(["--override", f'{{"{field}": 1}}'])
        assert f"{field} cannot be overridden" in capsys.readouterr().err
