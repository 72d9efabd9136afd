"""Short text, RULER and lm-eval's tasks beside lm-eval's numbers, offline. Slow: its index takes ten seconds."""

import contextlib
import io
import json
import os
import random
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import MethodType, ModuleType

import datasets
import evaluate as hf_evaluate
import lm_eval
import nltk
import numpy
import pytest
import torch
from lm_eval.models.huggingface import HFLM
from support.characters import CHARACTERS, character_tokenizer
from support.tiny import tiny
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from rope_patch.eval import EvalPlan, Ruler, lm_eval_tasks, ruler, run_suite, short_text
from rope_patch.eval.measures.harness import evaluate, quiet, task_index
from rope_patch.eval.measures.lm_eval_tasks import SUGGESTED, check_tasks, leaf_tasks
from rope_patch.eval.measures.ruler_prompts import TASKS, chosen_tasks, ruler_prompts
from rope_patch.eval.measures.short_text import BENCHMARKS, benchmark_rows, chosen_benchmarks
from rope_patch.eval.results.cache import afresh
from trl_ext import cli

pytestmark = pytest.mark.slow
TOKENIZER = character_tokenizer()
TEXT = "It was a dark night. The wind blew! Who was there? " * 80
# benchmark -> rows of a local file, and the same in the fields of the hub's dataset
LOCAL = {
    "arc_easy": [{"question": f"Is {k} even?", "choices": ["yes", "no, no", f"{k}"], "label": k % 3} for k in range(9)],
    "hellaswag": [
        {"ctx": f"Walk: A man walks {k} miles. the man", "choices": ["sits down.", "flies."], "label": k % 2}
        for k in range(6)
    ]
    + [{"ctx": "Health: How to walk. Stand up [step] Go on.", "choices": ["Walk [title] on.", "Sit."], "label": 0}],
    "winogrande": [
        {"sentence": f"The {k} beat the 7 as _ was more.", "choices": [f"{k}", "7"], "label": k % 2} for k in range(8)
    ],
}
HUB = {
    "arc_easy": [
        {
            "question": row["question"],
            "choices": {"text": row["choices"], "label": ["A", "B", "C"]},
            "answerKey": "ABC"[row["label"]],
        }
        for row in LOCAL["arc_easy"]
    ],
    "hellaswag": [
        {
            "activity_label": "Walk",
            "ctx_a": f"A man walks {k} miles.",
            "ctx_b": "the man",
            "endings": row["choices"],
            "label": str(row["label"]),
        }
        for k, row in enumerate(LOCAL["hellaswag"][:6])
    ]
    + [
        {
            "activity_label": "Health",
            "ctx_a": "How to walk. Stand up [step] Go on.",
            "ctx_b": "",
            "endings": ["Walk [title] on.", "Sit."],
            "label": "0",
        }
    ],
    "winogrande": [
        {
            "sentence": row["sentence"],
            "option1": row["choices"][0],
            "option2": row["choices"][1],
            "answer": str(row["label"] + 1),
        }
        for row in LOCAL["winogrande"]
    ],
}


def write_lines(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def model():
    return tiny(vocab_size=CHARACTERS, max_position_embeddings=4096)


def test_short_text_gives_lm_evals_own_numbers(model, tmp_path):
    tasks = []
    for name, rows in LOCAL.items():
        write_lines(tmp_path / f"{BENCHMARKS[name].file}.jsonl", rows)
        write_lines(tmp_path / f"hub_{name}.jsonl", HUB[name])
        files = dict.fromkeys(("train", "validation", "test"), str(tmp_path / f"hub_{name}.jsonl"))
        tasks.append(
            {"task": name, "dataset_path": "json", "dataset_name": None, "dataset_kwargs": {"data_files": files}}
        )
    ours = short_text(model, TOKENIZER, data=tmp_path)
    with quiet():
        lm = HFLM(pretrained=model, tokenizer=TOKENIZER)
        theirs = lm_eval.simple_evaluate(lm, tasks=[{"group": "shared", "task": tasks}], bootstrap_iters=0)
    for name in LOCAL:
        expected = {k.removesuffix(",none"): v for k, v in theirs["results"][name].items() if k.startswith("acc")}
        expected = {k: v for k, v in expected.items() if "stderr" not in k}
        assert ours.metrics[name] == pytest.approx(expected), name
        assert ours.samples[name] == len(LOCAL[name])
    assert 0 < ours.mean < 1, "a score that any model gets shows nothing"


def test_short_text_measures_the_model_as_it_is_and_no_more_than_asked(model, tmp_path):
    for name, rows in LOCAL.items():
        write_lines(tmp_path / f"{BENCHMARKS[name].file}.jsonl", rows)
    seen = []

    def remember(key, measure):
        seen.append(key)
        return afresh(key, measure)

    result = short_text(model.train(), TOKENIZER, data=tmp_path, benchmarks=["winogrande"], limit=3, remember=remember)
    assert result.samples == {"winogrande": 3} and seen == [{"benchmark": "winogrande"}]
    assert model.training
    model.eval()


def test_the_next_word_of_a_text_is_asked_for_as_raw_text(model, tmp_path):
    """Behind a chat template no model goes on with the text, so that LAMBADA was 0 for every model."""
    write_lines(
        tmp_path / "lambada_openai_test.jsonl", [{"text": f"A man walks {k} miles and sits down"} for k in (1, 2)]
    )
    write_lines(tmp_path / "winogrande_dev.jsonl", LOCAL["winogrande"])
    instruct = character_tokenizer()
    instruct.chat_template = "{% for m in messages %}<{{ m['content'] }}>{% endfor %}"
    auto, on, off = (
        short_text(model, instruct, data=tmp_path, chat_template=choice).metrics for choice in ("auto", "on", "off")
    )
    assert auto["lambada_openai"] == off["lambada_openai"] != on["lambada_openai"]
    assert auto["winogrande"] == on["winogrande"]
    assert short_text(model, TOKENIZER, data=tmp_path).metrics == off


def test_benchmarks_that_are_not_there_are_refused(model, tmp_path):
    refused = [
        (tmp_path / "none", None, FileNotFoundError, "there is no folder"),
        (tmp_path, None, FileNotFoundError, r"has none of lambada_openai_test, .* as .jsonl or .jsonl.xz"),
        (tmp_path, ["piqa"], FileNotFoundError, "has no piqa_valid.jsonl or .jsonl.xz for 'piqa'"),
        (tmp_path, ["mmlu_pro"], ValueError, "unknown benchmark 'mmlu_pro'. Known: .*linearard"),
    ]
    for data, benchmarks, error, message in refused:
        with pytest.raises(error, match=message):
            short_text(model, TOKENIZER, data=data, benchmarks=benchmarks)


@pytest.mark.parametrize(
    ("name", "rows", "message"),
    [
        ("piqa", [], "piqa_valid.jsonl has no rows"),
        (
            "piqa",
            [{"goal": "x", "sol1": "a", "label": 0}],
            "field choices of line 1 of .*piqa_valid.jsonl must be .*, got no such field among goal, sol1, label",
        ),
        ("piqa", [{"goal": "x", "choices": ["a", "b"], "label": "1"}], "label of line 1 .* from 0 to 1, got '1'"),
        ("piqa", [{"goal": "x", "choices": ["a"], "label": 0}], "field choices of line 1 .* two strings or more, got"),
        ("piqa", [{"goal": "x", "choices": 5, "label": 0}], "field choices of line 1 .* got 5"),
        ("hellaswag", [LOCAL["hellaswag"][0], {"ctx": None, "choices": [], "label": 0}], "field ctx of line 2 .* got"),
        ("boolq", [{"passage": "x", "question": "y", "label": 2}], "field label of line 1 of .* from 0 to 1, got 2"),
        (
            "mmlu",
            [{"subject": "heraldry", "question": "x", "choices": ["a", "b"], "label": 0}],
            "field subject of line 1 .* a subject of lm-eval's mmlu, as in mmlu_SUBJECT, got 'heraldry'",
        ),
        ("lambada_openai", [{"title": "x"}], "field text of line 1 .* must be a string, got no such field among title"),
    ],
)
def test_a_benchmark_of_another_form_is_refused_before_anything_is_measured(name, rows, message, tmp_path):
    write_lines(tmp_path / f"{BENCHMARKS[name].file}.jsonl", rows)
    with pytest.raises(ValueError, match=message):
        chosen_benchmarks(tmp_path, [name])


def test_each_benchmark_has_the_fields_that_are_listed(tmp_path):
    common = {"text": "x", "ctx": "x.", "goal": "x", "sentence": "_", "question": "x", "passage": "x", "label": 1}
    common |= {"context": "x", "subject": "anatomy"}
    for name, benchmark in BENCHMARKS.items():
        choices = ["a", "b", "c"] if name == "social_iqa" else ["a", "b"]
        write_lines(tmp_path / f"{benchmark.file}.jsonl", [{**common, "choices": choices}])
        (row,) = benchmark_rows(name, tmp_path / f"{benchmark.file}.jsonl")
        assert benchmark.convert(row)
    assert set(chosen_benchmarks(tmp_path, None)) == set(BENCHMARKS) - {"mmlu", "mathqa", "social_iqa"}
    assert set(chosen_benchmarks(tmp_path, ["linearard"])) >= {"mmlu", "mathqa", "social_iqa", "lambada_openai"}


def test_the_benchmarks_of_linearard_give_lm_evals_numbers_and_its_recovery(model, tmp_path):
    questions = [{"question": f"Is {k} even?", "choices": ["yes", "no, no", f"{k}"], "label": k % 3} for k in range(9)]
    write_lines(tmp_path / "social_iqa_dev.jsonl", [{**row, "context": "They count."} for row in questions])
    write_lines(tmp_path / "mathqa_test.jsonl", [{**row, "choices": [*row["choices"], "9", "8"]} for row in questions])
    subjects = {"anatomy": questions[:5], "virology": questions[2:]}
    fours = {k: [{**r, "choices": [*r["choices"], "4"], "subject": k} for r in rows] for k, rows in subjects.items()}
    write_lines(tmp_path / "mmlu_test.jsonl", [row for rows in fours.values() for row in rows])
    hub = {
        "social_iqa": [
            {
                "context": "They count.",
                "question": row["question"],
                **dict(zip(("answerA", "answerB", "answerC"), row["choices"], strict=True)),
                "label": str(row["label"] + 1),
            }
            for row in questions
        ],
        "mathqa": [
            {
                "Problem": row["question"],
                "options": f"a ) yes , b ) no, no , c ) {k} , d ) 9 , e ) 8",
                "correct": "abc"[row["label"]],
            }
            for k, row in enumerate(questions)
        ],
        **{f"mmlu_{k}": [{**row, "answer": row["label"]} for row in rows] for k, rows in fours.items()},
    }
    tasks = []
    for name, rows in hub.items():
        write_lines(tmp_path / f"hub_{name}.jsonl", rows)
        files = dict.fromkeys(("train", "validation", "test", "dev"), str(tmp_path / f"hub_{name}.jsonl"))
        tasks.append(
            {"task": name, "dataset_path": "json", "dataset_name": None, "dataset_kwargs": {"data_files": files}}
        )
    ours = short_text(model, TOKENIZER, data=tmp_path, benchmarks=["mmlu", "mathqa", "social_iqa"])
    with quiet():
        lm = HFLM(pretrained=model, tokenizer=TOKENIZER)
        theirs = lm_eval.simple_evaluate(lm, tasks=[{"group": "shared", "task": tasks}], bootstrap_iters=0)
    of_task = {name: theirs["results"][name]["acc,none"] for name in hub}
    by_size = (5 * of_task["mmlu_anatomy"] + 7 * of_task["mmlu_virology"]) / 12
    expected = {"mmlu": by_size, "mathqa": of_task["mathqa"], "social_iqa": of_task["social_iqa"]}
    assert ours.accuracy == pytest.approx(expected) and len(set(expected.values()) - {0, 1}) > 1
    assert ours.samples == {"mmlu": 12, "mathqa": 9, "social_iqa": 9}
    half = replace(ours, accuracy={name: accuracy / 2 for name, accuracy in ours.accuracy.items()})
    assert half.compared_with(ours) == {"recovery ratio, short text (%)": pytest.approx(50)}
    limited = short_text(model, TOKENIZER, data=tmp_path, benchmarks=["mmlu"], limit=2)
    assert limited.samples == {"mmlu": 4}, "of each subject, as lm-eval's own limit"


def writing(causal_lm, seen, reply):
    """Let `causal_lm` write `reply(prompt)`; `seen` collects the prompts."""

    def generate(self, input_ids, max_length=None, generation_config=None, **_):
        rows, max_length = [], max_length or input_ids.shape[1] + generation_config.max_new_tokens
        for row in input_ids:
            seen.append(TOKENIZER.decode(row, skip_special_tokens=True))
            n = max_length - len(row)
            rows.append(TOKENIZER(reply(seen[-1])[:n].ljust(n))["input_ids"])
        return torch.cat([input_ids, torch.tensor(rows)], dim=1)

    causal_lm.generate = MethodType(generate, causal_lm)
    return causal_lm


def lookup(causal_lm, seen, knows=lambda body, value: True):
    """Let `causal_lm` answer RULER's needle tasks with what the prompt says; `seen` collects the prompts."""

    def reply(text):
        body, _, question = text.rpartition("\nWhat")
        keys = re.findall(r"[a-z]+-[a-z]+|[0-9a-f]+-[0-9a-f-]+", question.partition("mentioned")[0])
        return ", ".join(v for k in keys for v in re.findall(rf"for {k} is: ([0-9a-f-]+)", body) if knows(body, v))

    return writing(causal_lm, seen, reply)


NEEDLES = [f"niah_{k}" for k in ("single_1", "single_2", "multikey_1", "multikey_2", "multivalue", "multiquery")]


def test_ruler_of_a_model_that_always_or_never_finds(tmp_path):
    options = {"tasks": NEEDLES, "samples": 2, "haystack": TEXT, "progress": False}
    made = ruler_prompts(TOKENIZER, [1500, 2500], **options)
    how, seen = {"batch_size": 2, "progress": False}, []
    always = ruler(lookup(tiny(vocab_size=CHARACTERS), seen), TOKENIZER, made, **how)
    assert always.scores == {task: [1.0, 1.0] for task in NEEDLES} and always.mean(2500) == 1
    assert len(seen) == 2 * 2 * len(NEEDLES), "as many prompts as asked for, not lm-eval's 500"
    # the window of the config is 64: nothing was cut to it, and no prompt with its answer is longer than its length
    assert max(map(len, seen[: len(seen) // 2])) <= 1500 < max(map(len, seen)) <= 2500
    kept = {tuple(key): documents for key, documents in json.loads(json.dumps(list(made.items())))}
    never = ruler(lookup(tiny(vocab_size=CHARACTERS), asked := [], lambda *_: False), TOKENIZER, kept, **how)
    assert asked == seen, "prompts can be kept as JSON"
    assert never.scores == {task: [0.0, 0.0] for task in NEEDLES}
    curves = always.by_answer_position.curves
    assert [curve["length"] for curve in curves] == [1500, 2500] and all(sum(c["count"]) == 2 for c in curves)
    assert type(always).from_dict(json.loads(json.dumps(always.to_dict()))) == always


def test_prompts_are_the_same_twice_and_by_several_processes(monkeypatch):
    counter = Tokenizer(WordLevel({"word": 0}, unk_token="word"))  # variable tracking's example has 900 characters
    counter.pre_tokenizer = Whitespace()
    words = PreTrainedTokenizerFast(tokenizer_object=counter)
    tasks = ["niah_single_2", "niah_multikey_2", "ruler_fwe", "ruler_vt"]
    options = {"tasks": tasks, "samples": 2, "haystack": TEXT * 2, "progress": False}
    alone = ruler_prompts(words, [900, 1500], **options)
    random.seed(3)
    numpy.random.seed(3)
    assert ruler_prompts(words, [900, 1500], **options) == alone, "whatever was drawn before"
    monkeypatch.setattr(sys.modules["rope_patch.eval.measures.ruler_prompts"], "_TOKENS", 1)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    together = ruler_prompts(words, [900, 1500], **options)
    assert together == alone and list(together) == list(alone)
    with pytest.raises(ValueError, match="^50 tokens are too few for RULER's niah_"):
        ruler_prompts(words, [50, 900], **options)


def test_a_text_that_ends_before_the_length_is_refused():
    with pytest.raises(
        ValueError, match=f"^the text has {len(TEXT)} tokens, which are too few for RULER's niah_single_2"
    ):
        ruler_prompts(TOKENIZER, [9000], tasks=["niah_single_2"], samples=2, haystack=TEXT, progress=False)


def test_a_text_that_ends_before_the_longest_length_is_refused_before_a_model_is_loaded(tmp_path):
    plan = EvalPlan(measures=("ruler",), length=200, lengths=(1500, 9000), ruler_tasks=("niah_single_2",))
    with pytest.raises(ValueError, match="^the text has .* RULER's niah_single_2 at 9000 tokens"):
        run_suite({"m": lambda: pytest.fail("loaded")}, TOKENIZER, [TEXT], plan, tmp_path)


def test_a_file_with_few_questions_gives_fewer_prompts_than_were_asked_for(tmp_path):
    towns = [
        {"title": f"t{k}", "paragraphs": [
            {"context": f"Rain in {k}.", "qas": [{"question": "Where?", "answers": [{"text": f"in {k}"}]}]}
        ]} for k in range(3)
    ]  # fmt: skip
    file = tmp_path / "squad.json"
    file.write_text(json.dumps({"data": towns}))
    tasks = ["ruler_qa_squad", "niah_single_1"]
    with pytest.warns(UserWarning, match=r"ruler_qa_squad has prompts of some \d+ tokens at 1500 .* squad.json has no"):
        made = ruler_prompts(TOKENIZER, [1500], tasks=tasks, samples=5, squad=file, haystack=TEXT, progress=False)
    found = ruler(lookup(tiny(vocab_size=CHARACTERS), []), TOKENIZER, made, progress=False, batch_size=2)
    n_questions = len(made[1500, "ruler_qa_squad"])
    assert 0 < n_questions < 5
    samples = {row["task"]: row["samples"] for row in found.table()}
    assert samples == {"ruler_qa_squad": n_questions, "niah_single_1": 5, "mean": n_questions + 5}


@pytest.mark.parametrize("length", [5, 200])
@pytest.mark.parametrize("task", ["ruler_vt", "ruler_cwe", "ruler_fwe", "niah_single_2", "niah_multikey_2"])
def test_lengths_that_ruler_has_no_room_in_are_told_before_a_model_is_loaded(task, length, tmp_path):
    plan = EvalPlan(measures=("cliff", "ruler"), length=200, n_rows=1, lengths=(9000, length), ruler_tasks=(task,))
    # the example that variable tracking shows has 500 whatever the length
    tokens = 500 if task == "ruler_vt" else length
    with pytest.raises(ValueError, match=f"^{tokens} tokens are too few for RULER's {task}[ ,]"):
        run_suite({"m": lambda: pytest.fail("loaded")}, TOKENIZER, [TEXT], plan, tmp_path)


def test_ruler_makes_lm_evals_prompts_and_gives_its_score(tmp_path):
    """One task that lm-eval makes without the network: the same seed gives the same prompts and the same score."""
    TOKENIZER.save_pretrained(tmp_path)

    def first_half(body, value):
        return body.index(value) < len(body) / 2

    ours_seen, theirs_seen = [], []
    model = lookup(tiny(vocab_size=CHARACTERS), ours_seen, first_half)
    prompts = ruler_prompts(TOKENIZER, [2000], tasks=["niah_multikey_2"], samples=12, progress=False)
    ours = ruler(model, TOKENIZER, prompts, progress=False)
    lookup(model, theirs_seen, first_half)
    with quiet():
        manager = lm_eval.tasks.TaskManager(metadata={"max_seq_lengths": [2000], "tokenizer": str(tmp_path)})
        random.seed(42)
        task = manager.load(["niah_multikey_2"])["tasks"]["niah_multikey_2"]
        tasks = {"tasks": {"niah_multikey_2": task}, "groups": {}, "group_map": {}}
        lm = HFLM(pretrained=model, tokenizer=TOKENIZER, max_length=2200)
        theirs = lm_eval.evaluate(lm, tasks, limit=12, bootstrap_iters=0)
    assert sorted(ours_seen) == sorted(theirs_seen)
    assert ours.scores["niah_multikey_2"] == [theirs["results"]["niah_multikey_2"]["2000,none"]]
    assert 0 < ours.mean(2000) < 1
    (curve,) = ours.by_answer_position.curves
    assert curve["kind"] == "niah_multikey_2" and curve["length"] == 2000 and sum(curve["count"]) == 12
    assert all(a == (k < 5) for k, (a, n) in enumerate(zip(curve["accuracy"], curve["count"], strict=True)) if n)
    (below,) = Ruler.figure({"m": ours}).axes[1:]
    known = [a for a in curve["accuracy"] if a is not None]
    assert below.get_lines()[0].get_ydata().tolist() == known
    assert "m, niah_multikey_2: accuracy in the middle third" in Ruler.readings({"m": ours})[1]


@pytest.mark.parametrize("at_once", [None, 2])
def test_greedy_answers_are_those_of_lm_evals_own_generation(at_once, monkeypatch):
    """Prompts of several lengths, which lm-eval pads on the left."""
    logged, ours = {}, evaluate

    def watched(model, tokenizer, tasks, *, greedy, **options):
        assert greedy
        for way in (True, False):
            options["batch_size"] = at_once if way else 1
            found = ours(model, tokenizer, tasks, greedy=way, **options)
            logged[way] = [[s["resps"] for s in sorted(of, key=lambda s: s["doc_id"])] for _, of in found]
        return found

    monkeypatch.setattr(sys.modules["rope_patch.eval.measures.ruler"], "evaluate", watched)
    model = tiny(vocab_size=CHARACTERS, max_position_embeddings=4096)
    # of two tasks, whose replies have limits of their own, in one call
    tasks = ["niah_multikey_2", "ruler_fwe"]
    ruler(model, TOKENIZER, ruler_prompts(TOKENIZER, [900], tasks=tasks, samples=4, progress=False), progress=False)
    assert logged[True] == logged[False] and [len(of) for of in logged[True]] == [4, 4]
    assert len({str(r) for r in logged[True][0]}) > 1


def test_question_answering_reads_the_datasets_own_files(tmp_path):
    squad = [
        {"title": f"T{t}", "paragraphs": [
            {"context": f"Paragraph {t} {p} of the book.", "qas": [
                {"question": f"What is {t} {p}?", "answers": [{"text": f"answer {t}{p}"}]},
                {"question": "What is not there?", "answers": []},
            ]} for p in range(5)
        ]} for t in range(4)
    ]  # fmt: skip
    (tmp_path / "squad.json").write_text(json.dumps({"data": squad}))
    hotpot = [
        {
            "question": f"Who is {k}?",
            "answer": f"Person {k}",
            "context": [[f"Page {k}", ["One.", " Two."]], ["All", ["x"]]],
        }
        for k in range(12)
    ]
    (tmp_path / "hotpot.json").write_text(json.dumps(hotpot))
    contexts = {"ruler_qa_squad": "Paragraph {} {} of the book.", "ruler_qa_hotpot": "Page {}\nOne. Two."}
    options = {"squad": tmp_path / "squad.json", "hotpotqa": tmp_path / "hotpot.json", "progress": False}
    for (_, task), documents in ruler_prompts(TOKENIZER, [1200], tasks=list(contexts), samples=3, **options).items():
        context = contexts[task]
        assert len(documents) == 3
        for document in documents:
            numbers = re.findall(r"\d", re.findall(r"(?:What|Who) is [\d ]+\?", document["input"])[-1])
            assert context.format(*numbers) in document["input"]
            assert "".join(numbers) in document["outputs"][0].replace(" ", "")
            assert len(document["input"]) <= 1200


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("squad.json", '[{"question": "q"}]', "squad.json cannot be read: .* It must be SQuAD's own JSON file, "),
        ("squad.json", '{"data": []}', "squad.json has no question with an answer"),
        ("squad.json", "no JSON", "squad.json cannot be read: Expecting value"),
        ("squad.jsonl", '{"title": "t", "context": "c"}', "squad.jsonl cannot be read: no field 'qas'. It must be"),
        ("hotpot.json", '{"data": []}', "hotpot.json cannot be read: .* It must be HotpotQA's own JSON file"),
        ("hotpot.jsonl", '{"question": "q"}', "hotpot.jsonl cannot be read: no field 'context'"),
        ("hotpot.json", "[]", "hotpot.json has no questions"),
    ],
)
def test_question_answering_refuses_files_of_another_form(name, content, message, tmp_path):
    (tmp_path / name).write_text(content)
    given = {"haystack": None, "squad": None, "hotpotqa": None}
    given["squad" if name.startswith("squad") else "hotpotqa"] = tmp_path / name
    with pytest.raises(ValueError, match=message):
        chosen_tasks(None, **given)


def test_ruler_refuses_what_it_cannot_measure():
    refused = [
        ({"tasks": ["niah_single_2"]}, "RULER's niah_single_2 needs haystack"),
        ({"tasks": ["ruler_qa_squad"]}, "RULER's ruler_qa_squad needs squad"),
        ({"tasks": ["niah"]}, "unknown RULER task 'niah'. Known: niah_single_1"),
    ]
    for arguments, message in refused:
        with pytest.raises(ValueError, match=message):
            ruler_prompts(TOKENIZER, [1500], progress=False, **arguments)


GSM = [{"question": f"What is {k} plus 1?", "answer": f"It is one more.\n#### {k + 1}"} for k in range(6)]
MMLU = [
    {"subject": subject, "question": f"Is {k} even?", "choices": ["yes", "no", "3", "4"], "answer": k % 2}
    for subject in ("anatomy", "virology")
    for k in range(5)
]


def test_tasks_by_name_give_lm_evals_own_numbers(model, tmp_path):
    """Of a group in one file, one task in a file of its own, and a task that shows examples."""
    write_lines(tmp_path / "mmlu.jsonl", MMLU)
    write_lines(tmp_path / "mmlu_anatomy_hub.jsonl", MMLU[:5])
    write_lines(tmp_path / "mmlu_virology_hub.jsonl", MMLU[5:])
    ours = lm_eval_tasks(model, TOKENIZER, ["mmlu"], length=2000, data=tmp_path)
    tasks = [
        {
            "task": f"mmlu_{subject}",
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": {"data_files": {"test": str(tmp_path / f"mmlu_{subject}_hub.jsonl")}},
            "fewshot_split": "test",
        }
        for subject in ("anatomy", "virology")
    ]
    with quiet():
        lm = HFLM(pretrained=model, tokenizer=TOKENIZER, max_length=2000)
        theirs = lm_eval.simple_evaluate(lm, tasks=[{"group": "shared", "task": tasks}], bootstrap_iters=0)
    expected = {name: theirs["results"][name]["acc,none"] for name in ("mmlu_anatomy", "mmlu_virology")}
    assert ours.parts["mmlu"] == pytest.approx(expected) and len(ours.scores["mmlu"]) == 10
    assert ours.accuracy["mmlu"] == pytest.approx(sum(expected.values()) / 2) and ours.left_out == {"mmlu": 0}
    assert type(ours).from_dict(json.loads(json.dumps(ours.to_dict()))) == ours


OWN_TASK = """
task: parity
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "Is {{{{k}}}} even?"
doc_to_choice: ["yes", "no, no"]
doc_to_target: answer
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


def test_tasks_of_ones_own_folder_give_lm_evals_own_numbers(model, tmp_path):
    (tmp_path / "tasks").mkdir()
    write_lines(tmp_path / "parity.jsonl", [{"k": k, "answer": k % 2} for k in range(9)])
    (tmp_path / "tasks/parity.yaml").write_text(OWN_TASK.format(rows=tmp_path / "parity.jsonl"))
    ours = lm_eval_tasks(model, TOKENIZER, ["parity"], length=200, include=tmp_path / "tasks")
    with pytest.raises(ValueError, match="lm-eval has no task 'parity'"):
        lm_eval_tasks(model, TOKENIZER, ["parity"], length=200)
    with quiet():
        lm = HFLM(pretrained=model, tokenizer=TOKENIZER, max_length=200)
        index = lm_eval.tasks.TaskManager(include_path=str(tmp_path / "tasks"))
        theirs = lm_eval.simple_evaluate(lm, tasks=["parity"], task_manager=index, bootstrap_iters=0)
    assert ours.accuracy["parity"] == pytest.approx(theirs["results"]["parity"]["acc,none"])
    assert len(ours.scores["parity"]) == 9


def summed(prompt):
    """Sums, all right but that of 3."""
    k = int(re.findall(r"What is (\d+) plus", prompt)[-1])
    return f"I say #### {k + (k != 3)}"


def times(prompt):
    """The body of a function f2 that doubles, and so on; that of f3 is wrong."""
    return f"    return n * {prompt[-6].replace('3', '9')}\n"


class CodeEval:
    """The metric code_eval of the hub, for one program."""

    def compute(self, references, predictions, k):
        assert os.environ["HF_ALLOW_CODE_EVAL"] == "1" and k == [1]
        ((candidate,),), (test,) = predictions, references
        try:
            exec(f"{candidate}\n{test}", {})
        except AssertionError:
            return {"pass@1": 0.0}, {}
        return {"pass@1": 1.0}, {}


def test_code_of_the_model_runs_only_where_this_is_allowed(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_ALLOW_CODE_EVAL", "0")
    monkeypatch.setattr(hf_evaluate, "load", lambda name: {"code_eval": CodeEval()}[name])
    test = "def check(candidate):\n    assert candidate(5) == {}\n"
    rows = [
        {"task_id": f"{k}", "prompt": f"def f{k}(n):\n", "test": test.format(5 * k), "entry_point": f"f{k}"}
        for k in (2, 3, 4)
    ]
    write_lines(tmp_path / "humaneval.jsonl", rows)
    causal_lm = writing(tiny(vocab_size=CHARACTERS), [], times)
    options = {"length": 2000, "data": tmp_path, "batch_size": 3}
    with pytest.raises(ValueError, match="humaneval may run the code .* --confirm-run-unsafe-code"):
        lm_eval_tasks(causal_lm, TOKENIZER, ["humaneval"], **options)
    result = lm_eval_tasks(causal_lm, TOKENIZER, ["humaneval"], **options, confirm_run_unsafe_code=True)
    assert result.scores == {"humaneval": [1.0, 0.0, 1.0]} and result.accuracy == {"humaneval": 2 / 3}
    plan = EvalPlan(("lm-eval",), length=2000, lm_eval=("longproc",))
    with pytest.raises(ValueError, match="--confirm-run-unsafe-code"):
        plan.check(TOKENIZER, [])


def test_examples_long_documents_and_replies(tmp_path):
    causal_lm, seen = tiny(vocab_size=CHARACTERS), []
    long = {"question": "word " * 400 + "What is 9 plus 1?", "answer": "#### 10"}
    write_lines(tmp_path / "gsm8k.jsonl", [*GSM, long])
    result = lm_eval_tasks(writing(causal_lm, seen, summed), TOKENIZER, ["gsm8k"], length=1000, data=tmp_path)
    assert result.scores["gsm8k"] == [1, 1, 1, 0, 1, 1] and result.left_out == {"gsm8k": 1}
    assert "Left out, because prompt and answer are longer than the longest length: 1 of gsm8k." in result.reading()
    assert len(seen) == 6 and all(text.count("Question:") == 1 for text in seen), "no example without their file"
    (reply,) = result.replies
    assert "#### 1" in reply["reply"] and "#### 1" in reply["expected"] and "What is 0 plus 1?" in reply["question"]
    seen.clear()
    write_lines(tmp_path / "gsm8k.fewshot.jsonl", [{"question": f"E{k}", "answer": f"#### {k}"} for k in range(6)])
    shown = lm_eval_tasks(causal_lm, TOKENIZER, ["gsm8k"], length=1500, data=tmp_path, limit=4)
    assert shown.scores["gsm8k"] == [1, 1, 1, 0] and all(text.count("Question:") == 6 for text in seen)
    with pytest.raises(ValueError, match="lm-eval's gsm8k has no document of up to 100 tokens"):
        lm_eval_tasks(causal_lm, TOKENIZER, ["gsm8k"], length=100, data=tmp_path)


def test_long_tasks_are_read_from_local_files(tmp_path):
    """LongBench v2, InfiniteBench, BABILong and GraphWalks, each with the fields of its data set, and read whole."""
    causal_lm, seen = tiny(vocab_size=CHARACTERS), []
    writing(causal_lm, seen, lambda _: " Final Answer: [ab] 12345 hallway")
    book = "A man walks on. " * 200
    write_lines(
        tmp_path / "longbench2.jsonl",
        [{"task": "longbench2_graph", "context": book, "question": "Who?", "choices": list("wxyz"), "answer": 1}],
    )
    write_lines(
        tmp_path / "infinitebench_passkey.jsonl",
        [{"id": 0, "context": book, "input": "Which key?", "answer": [" Fina"], "options": []}],
    )
    write_lines(
        tmp_path / "babilong.jsonl",
        [{"task": "babilong_qa1", "input": book, "question": "Where is Al?", "target": "hallway"}],
    )
    write_lines(tmp_path / "graphwalks_128k.jsonl", [{"prompt": book, "answer_nodes": ["ab"]}])
    names = ["longbench2", "infinitebench", "babilong", "graphwalks"]
    result = lm_eval_tasks(causal_lm, TOKENIZER, names, length=30_000, data=tmp_path)
    assert {name: list(parts) for name, parts in result.parts.items()} == {
        "longbench2": ["longbench2_graph"],
        "infinitebench": ["infinitebench_passkey"],
        "babilong": ["babilong_qa1"],
        "graphwalks": ["graphwalks_128k"],
    }
    assert len(seen) == 3 and all(text.count("A man walks on.") == 200 for text in seen), "nothing was cut"
    assert sum("Charlie went to the hallway" in text for text in seen) == 1, "BABILong's own examples"


def test_a_task_is_told_by_its_first_metric_that_is_a_score_of_each_sample(model, tmp_path):
    write_lines(tmp_path / "lambada_openai.jsonl", [{"text": "It was a dark night"}] * 3)
    result = lm_eval_tasks(model, TOKENIZER, ["lambada_openai"], length=500, data=tmp_path)
    assert set(result.scores["lambada_openai"]) <= {0.0, 1.0}, "and not by perplexity, which comes first"
    assert result.metrics["lambada_openai"]["perplexity"] > 1
    write_lines(tmp_path / "wikitext.jsonl", [{"page": "It was a dark night"}])
    with pytest.raises(ValueError, match="wikitext has no metric that is a score of each sample.* word_perplexity"):
        check_tasks(["wikitext"], tmp_path, 500)


def test_tasks_that_are_not_there_are_refused_with_the_list(model, tmp_path):
    refused = [
        (
            ["mmul"],
            None,
            ValueError,
            "lm-eval has no task 'mmul'. Similar names: mmlu.* among them longbench2, infinite",
        ),
        (["gsm8k"], tmp_path / "no", FileNotFoundError, "there is no folder"),
        (["gsm8k"], tmp_path, FileNotFoundError, "has no gsm8k.jsonl as .jsonl or .jsonl.xz, for lm-eval's 'gsm8k'"),
        (["graphwalks"], tmp_path, FileNotFoundError, "has no graphwalks.jsonl, nor any of graphwalks_128k, graph"),
    ]
    for tasks, data, error, message in refused:
        with pytest.raises(error, match=message):
            check_tasks(tasks, data, 1000)


def test_files_that_do_not_fit_are_refused_before_a_model_is_asked(tmp_path):
    """Each names the file, what is wrong with it and what a row needs; a field that lacks is never empty text."""
    other = {"q": "a", "answer": "#### 1"}
    without_choices = {**MMLU[0], "choices": "ab"}
    refused = [
        ("gsm8k", {"gsm8k": [other]}, "cannot read .*gsm8k.jsonl .*'question' is undefined.* these have q, answer"),
        ("gsm8k", {"gsm8k": [{"question": "a", "a": "1"}]}, "cannot read .*gsm8k.jsonl .*'answer' is undefined"),
        ("gsm8k", {"gsm8k": GSM, "gsm8k.fewshot": [other] * 6}, "cannot read .*gsm8k.jsonl or .*gsm8k.fewshot.jsonl"),
        ("gsm8k", {"gsm8k": GSM, "gsm8k.fewshot": GSM[:2]}, "fewshot.jsonl .*it needs 5 examples, and there are 2"),
        ("gsm8k", {"gsm8k": [*GSM, {"question": "a"}]}, "line 7 of .*gsm8k.jsonl has no field answer, which the first"),
        ("gsm8k", {"gsm8k": [*GSM, [1, 2]]}, "line 7 of .*gsm8k.jsonl is no JSON object, but list"),
        ("gsm8k", {"gsm8k": []}, "gsm8k.jsonl has no rows"),
        (
            "mmlu",
            {"mmlu": [*MMLU, {**MMLU[0], "subject": "anatmy"}]},
            "mmlu.jsonl has rows of mmlu_anatmy, which are no tasks",
        ),
        ("mmlu", {"mmlu": [{"question": "a"}]}, "has rows of mmlu_None, .* in `task`, or as mmlu_SUBJECT in `subject`"),
        ("mmlu", {"mmlu": [without_choices]}, "lm-eval's mmlu_anatomy cannot read .*mmlu.jsonl"),
        ("graphwalks", {"graphwalks_128k": [{"prompt": "a"}]}, "cannot read .*'answer_nodes' is undefined"),
    ]
    for k, (task, files, message) in enumerate(refused):
        (tmp_path / str(k)).mkdir()
        for name, rows in files.items():
            write_lines(tmp_path / str(k) / f"{name}.jsonl", rows)
        with pytest.raises(ValueError, match=message):
            check_tasks([task], tmp_path / str(k), 1000)
    (tmp_path / "gsm8k.jsonl").write_text('{"question": "a", "answer": "b"}\n{"question": \n')
    with pytest.raises(ValueError, match=r"line 2 of .*gsm8k.jsonl is no JSON object: Expecting value"):
        check_tasks(["gsm8k"], tmp_path, 1000)


def test_without_the_hub_the_error_says_what_to_give(monkeypatch):
    def unreachable(*_, **__):
        raise ConnectionError("Couldn't reach the hub")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(OSError, match=r"gsm8k cannot be loaded from the hub .*folder with gsm8k.jsonl in it, as --lm"):
        check_tasks(["gsm8k"], None, 1000)


def test_a_package_that_a_task_needs_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "langdetect", None)
    for name in [name for name in sys.modules if "ifeval" in name]:
        monkeypatch.delitem(sys.modules, name)
    write_lines(tmp_path / "ifeval.jsonl", [{"prompt": "Say no.", "instruction_id_list": [], "kwargs": []}])
    with pytest.raises(ImportError, match=r"ifeval needs the package langdetect, .* pip install 'lm_eval\[ifeval\]'"):
        check_tasks(["ifeval"], tmp_path, 1000)


def test_ifeval_without_its_data_for_sentences_is_refused_before_a_model_is_asked(tmp_path, monkeypatch):
    """lm-eval needs them when it scores the answers, after hours; its packages are stand-ins here."""

    class Immutable(ModuleType):
        immutabledict = dict

    for name in [name for name in sys.modules if "ifeval" in name]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "langdetect", ModuleType("langdetect"))
    monkeypatch.setitem(sys.modules, "immutabledict", Immutable("immutabledict"))
    write_lines(tmp_path / "ifeval.jsonl", [{"prompt": "Say no.", "instruction_id_list": [], "kwargs": []}])
    present = {"there": False}

    def load(language):
        if not present["there"]:
            raise LookupError(language)

    monkeypatch.setattr(nltk.tokenize, "PunktTokenizer", load)
    with pytest.raises(ImportError, match="needs NLTK's data punkt_tab.* python -m nltk.downloader punkt_tab"):
        check_tasks(["ifeval"], tmp_path, 1000)
    present["there"] = True
    check_tasks(["ifeval"], tmp_path, 1000)


def test_lm_eval_tells_of_no_download_where_there_was_none(monkeypatch, capsys):
    from lm_eval.tasks.ruler import prepare_niah

    def missing(name, *_):
        raise LookupError(name)

    monkeypatch.setattr(nltk.data, "find", missing)
    monkeypatch.delitem(sys.modules, prepare_niah.__name__)  # so that it is imported once more
    monkeypatch.delattr(lm_eval.tasks.ruler, "prepare_niah")
    capsys.readouterr()
    ruler_prompts(TOKENIZER, [2000], tasks=["niah_single_1"], samples=1, progress=False)
    assert capsys.readouterr().out == ""


def test_babilong_of_the_hub_comes_in_texts_of_the_length(monkeypatch):
    loaded = []

    def load(path, name=None, split=None, **_):
        loaded.append((path, name, split))
        return datasets.Dataset.from_list([{"input": "a", "question": "b", "target": "c"}])

    monkeypatch.setattr(datasets, "load_dataset", load)
    check_tasks(["babilong_qa1"], None, 40_000)
    assert loaded == [("RMT-team/babilong-1k-samples", "32k", "qa1")]


def test_every_task_that_is_named_to_users_is_one_of_lm_evals():
    """In the help of the flag, on the page about evaluation and in the list of near names."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        cli.main(["eval", "--help"])
    words = " ".join(out.getvalue().split())
    in_help = re.search(r"long ones such as (.*?), and short ones such as (.*?)\. niah_", words)
    page = (Path(__file__).parents[4] / "docs" / "evaluation.md").read_text()
    in_page = re.search(r"any of lm-eval's tasks by name: (.*?) \|", page)
    named = {name for group in in_help.groups() for name in group.split(", ")} | set(re.findall(r"`(.*?)`", in_page[1]))
    assert {"longbench2", "infinitebench", "babilong", "graphwalks", "mmlu", "gsm8k", "ifeval"} <= named
    named |= {*SUGGESTED, *TASKS, *BENCHMARKS}
    index = task_index()
    assert named <= set(index), named - set(index)
    for name in ("longbench2", "infinitebench", "babilong", "graphwalks", "mmlu", "gsm8k", "ifeval"):
        for leaf in leaf_tasks(name):
            # the hub's data set that it loads, out of its file in the installed package
            assert index[leaf].kind.name in ("TASK", "PY_TASK") and index[leaf].yaml_path.is_file(), leaf
