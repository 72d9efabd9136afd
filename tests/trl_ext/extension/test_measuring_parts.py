"""What several processes measure is what one measures, and each has about as much to do."""

import functools
import json
from dataclasses import replace

import pytest
from scaling import extended_model, extension_plan
from support.shapes import size

from trl_ext.extension.choices import choose
from trl_ext.extension.facts import ModelFacts
from trl_ext.extension.machine import Machine
from trl_ext.extension.measuring import eval_plan, measure
from trl_ext.extension.measuring_parts import measure_parts, operations_of, parts_of, shares_of
from trl_ext.extension.options import ExtendOptions
from trl_ext.extension.texts import Texts

MODEL = extended_model("Llama-3-8B")


@pytest.fixture(scope="module")
def plan():
    """Of 8B weights to 131072 positions on a GPU, RULER too."""
    choices = extension_plan(MODEL, 80, 1).choices
    value = {**choices.evaluation.value, "ruler_tasks": ["a", "b", "c", "d"], "ruler_lengths": [4096, 131072]}
    evaluation = replace(choices.evaluation, value={**value, "measures": ["cliff", "passkey", "ruler"]})
    return eval_plan(MODEL, replace(choices, evaluation=evaluation), seed=0)


def test_parts_are_all_of_a_plan(plan):
    parts = parts_of(plan)
    rows, passkeys, ruler = ([p for p in parts if p.plan.measures == (name,)] for name in plan.measures)
    assert [(p.length, p.count) for p in rows] == [(131072, 4)]
    assert [(p.plan.lengths, p.length, p.count) for p in passkeys] == [((n,), n, 40) for n in plan.lengths]
    # at the longest length a killed run loses one task at most, and others are asked together
    assert [(p.plan.ruler_lengths, p.plan.ruler_tasks, p.count) for p in ruler] == [
        ((4096,), ("a", "b", "c", "d"), 80),
        *(((131072,), (task,), 20) for task in "abcd"),
    ]


def test_no_process_has_more_to_do_than_another_by_more_than_a_part(plan):
    parts, costs = parts_of(plan), []
    cost = functools.partial(operations_of, size("llama-3-8b"))
    for n in (1, 2, 3, 8):
        shares = shares_of(parts, n, cost)
        assert sorted(map(id, sum(shares, []))) == sorted(map(id, parts))
        sums = [sum(map(cost, share)) for share in shares]
        assert max(sums) - min(sums) <= max(map(cost, parts))
        costs.append(max(sums))
    assert costs[0] / costs[1] > 1.9


@pytest.mark.slow
def test_two_processes_measure_what_one_measures(folder, capfd, monkeypatch):
    facts = ModelFacts.of("base")
    options = ExtendOptions(
        model="base", to=1600, data=("books.jsonl",), output="out", device="cpu", prompts=2, lengths=(700, 1500)
    )
    plan = eval_plan(facts, choose(facts, options, Machine.of("cpu")), seed=0)
    documents = [json.loads(line)["text"] for line in (folder / "books.jsonl").read_text().splitlines()]
    texts = Texts([], documents, "books")
    expected = measure("before", facts.load, facts, plan, texts, "cpu", folder / "one")
    shares = shares_of(parts_of(plan), 2, lambda part: part.length * part.count)
    assert all(shares)
    measure_parts("before", facts.load, facts, shares, texts, "cpu", folder / "two")
    for name in ("retrieval.ask_greedily", "loss_by_position.loss_by_position"):
        monkeypatch.setattr(f"rope_patch.eval.measures.{name}", lambda *_, **__: pytest.fail("measured again"))
    assert measure("before", facts.load, facts, plan, texts, "cpu", folder / "two") == expected
    capfd.readouterr()
    with pytest.raises(ChildProcessError, match=r"processes that measure have ended with status \[1, 1\]"):
        measure_parts("before", int, facts, shares, texts, "cpu", folder / "three")
    assert "TypeError: int() argument must be" in capfd.readouterr().err
