"""A measure of a package of its own gives prompts, and gets page, figure, table, regressions and stored results."""

import csv
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.characters import CHARACTERS, character_tokenizer
from support.packages import installed
from support.tiny import tiny

from rope_patch.eval import EvalPlan, regressions, run_suite, verdict, write_report

CODE = Path(__file__).parents[3].joinpath("support/two_hop.py").read_text()
TEXTS = ["It was a dark night. The wind blew! Who was there? " * 20]
PLAN = {"measures": ("two-hop",), "length": 500, "lengths": (300, 400), "trials": 8, "options": {"hops": 3}}


@pytest.fixture(autouse=True)
def two_hop(tmp_path):
    with installed(tmp_path / "site", "of_two_hop", CODE, measures=["two-hop"]):
        yield


@pytest.fixture
def asked(monkeypatch):
    """Lets the models of `run` solve the prompts, or not; gives the length of each that was asked, with its reply."""
    seen = []

    def answers(model, tokenizer, prompts, **_):
        replies = []
        for ids in prompts:
            text = tokenizer.decode(ids)
            name = re.fullmatch(r".*\nThe value of VAR (\w\w) is", text, re.DOTALL)[1]
            values, steps = dict(re.findall(r" VAR (\w\w) = (\w+)\.", text)), 0
            while name in values:
                name, steps = values[name], steps + 1
            assert steps == len(values) and name.isdigit()
            replies.append(f" {name}." if model.solves else f" {name[:3]} or so")
            seen.append((len(ids), steps, replies[-1]))
        return replies

    monkeypatch.setattr("rope_patch.eval.measures.asking.greedy_answers", answers)
    return seen


def run(cache, *solves, **plan):
    """One model for each of `solves`, which says whether it does: "native", and then "1"."""

    def loaded(solves):
        model = tiny(vocab_size=CHARACTERS)
        model.solves = solves
        with torch.no_grad():
            model.lm_head.weight.mul_(1 + solves)  # weights of its own, by which results are stored
        return model

    labels = ["native", *map(str, range(1, len(solves)))]
    models = {label: lambda s=s: loaded(s) for label, s in zip(labels, solves, strict=True)}
    return run_suite(models, character_tokenizer(), TEXTS, EvalPlan(**{**PLAN, **plan}), cache)


def test_the_report_has_all_that_is_said_of_the_measures_of_this_package(asked, tmp_path):
    results = run(tmp_path / "cache", False, True)
    assert {(n, steps) for n, steps, _ in asked} == {(288, 4), (388, 4)} and len(asked) == 2 * 2 * 8
    page = write_report(results, tmp_path, title="t", settings={})
    html, folder = page.read_text(), page.parent
    assert ">Answers: two-hop<" in html and "1: 100 % at 300 tokens, 100 % at 400 tokens." in html
    assert "The value of VAR" in html and any(reply.strip() in html for _, _, reply in asked[8:16]), (
        "one question and a reply to it"
    )
    assert (folder / "figures/two-hop.png").is_file()
    with (folder / "tables/two-hop.csv").open() as file:
        rows = [
            (row["model"], row["length"], row["score"], row["prompts"], row["difference"])
            for row in csv.DictReader(file)
        ]
    assert rows[2:] == [("1", "300", "1.0", "8", "1.0"), ("1", "400", "1.0", "8", "1.0")]
    found = regressions(results)
    assert verdict(found)[:2] == [f"Won:  two-hop at {n}: the score is 100 %, native 0 %." for n in (300, 400)]
    assert verdict(found)[-1].startswith("With 8 prompts a length, changes of less than about 75 percentage points")
    # all eight went from wrong to right: a share of 1 - .025^(1/8) may go the other way, by Clopper and Pearson
    assert [(cell.n, cell.p, cell.high) for cell in found.above] == [(8, 2 / 2**8, 1)] * 2
    assert found.above[0].low == pytest.approx(1 - 2 * (1 - 0.025 ** (1 / 8)))


def test_what_was_asked_is_stored_by_its_prompts(asked, tmp_path):
    first = run(tmp_path, True)
    assert run(tmp_path, True)["two-hop"]["native"] == first["two-hop"]["native"] and len(asked) == 16
    for plan, n in (({"lengths": (400, 450)}, 8), ({"seed": 1}, 16), ({"options": {}}, 16)):
        before = len(asked)
        run(tmp_path, True, **plan)
        assert len(asked) == before + n
    assert asked[-1][1] == 3, "the default of two hops"


def test_models_that_got_other_prompts_are_not_compared(asked, tmp_path):
    results = run(tmp_path, False, True)["two-hop"]
    results["1"] = replace(results["1"], prompt_hashes=["other", "prompts"])
    with pytest.raises(ValueError, match="1 read other prompts of two-hop than the baseline"):
        regressions({"two-hop": results})


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        ({"lengths": (400, 60)}, r"48 tokens are too few for 4 sentence\(s\) and the question, which take"),
        ({"lengths": (3000,)}, "the haystack has 1020 tokens"),
        ({"options": {"hopps": 3}}, "Unknown option 'hopps' of measures two-hop. Did you mean 'hops'"),
    ],
)
def test_what_cannot_be_asked_shows_before_a_model_is_loaded(plan, why, tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "tiny", lambda **_: pytest.fail("loaded"))
    with pytest.raises(ValueError, match=why):
        run(tmp_path, True, **plan)


def test_a_result_is_read_back(asked, tmp_path):
    result = run(tmp_path, True)["two-hop"]["native"]
    assert type(result).from_dict(json.loads(json.dumps(result.to_dict()))) == result
