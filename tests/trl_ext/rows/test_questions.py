"""Rows with hidden facts: each is told before it is asked, and nothing but answers is labelled."""

import ast
import importlib.util
import itertools
import random
import re
from pathlib import Path

import pytest
import trl
from hypothesis import given, settings
from hypothesis import strategies as st
from support.asked_rows import TEMPLATE, answers_of, bos_tokenizer

from rope_patch.prompts import needles, wordings
from trl_ext.rows import question_rows
from trl_ext.rows.facts import SYLLABLES, draw_facts
from trl_ext.rows.skill_wordings import CHAINS, COMPARISONS, COUNTS, ORDERS, PASSAGES, VALUES
from trl_ext.rows.wordings import FACT_WORDINGS, FILLERS

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
TEXT = ["It was a dark night. The wind blew! Who was there? " * 120, "Dull days went by. " * 300]


def pattern(sentence):
    """A regex of a sentence of a wording, with groups name and value."""
    return re.escape(sentence).replace(r"\{name\}", r"(?P<name>\w+)").replace(r"\{value\}", r"(?P<value>[\w:]+)")


def check(tokenizer, row, facts, length):
    """That of one wording all facts are told, and each is then asked and answered; the wording."""
    assert len(row.ids) == len(row.labelled) == length and row.ids.count(1) == 1 and row.ids[0] == 1
    text = tokenizer.decode(row.ids)
    answers = answers_of(tokenizer, row)
    assert len(answers) == facts
    told_in_text = answers[0][0]
    for wording in FACT_WORDINGS:
        told = {m["name"]: (m["value"], m.end()) for m in re.finditer(" " + pattern(wording.fact), told_in_text)}
        names = [m["name"] for m in re.finditer(pattern(wording.question), text)]
        if len(told) >= facts and sorted(names) == sorted(told):
            break
    else:
        pytest.fail("no wording of which all facts are told and asked")
    assert len({value for value, _ in told.values()}) == facts
    for name, (before, answer) in zip(names, answers, strict=True):
        value, told_at = told[name]
        lead, rest = wording.reply.split("{value}")
        assert answer == f" {value}{rest}" and before.endswith(lead.format(name=name).rstrip())
        asked_at = before.rindex(wording.question.format(name=name))
        assert told_at <= asked_at and answer not in before[asked_at:]
    return wording


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    facts=st.integers(1, 5),
    chat=st.sampled_from([0.0, 0.5, 1.0]),
    length=st.integers(1200, 1900),
)
def test_labelled_tokens_are_the_answers_to_what_was_told(seed, facts, chat, length):
    tokenizer = bos_tokenizer()
    options = {"length": length, "facts": facts, "chat": chat, "seed": seed}
    rows = question_rows(tokenizer, TEXT, 4, **options)
    for row in rows:
        check(tokenizer, row, facts, length)
        text = tokenizer.decode(row.ids)
        in_chat = text.startswith("<bos>[user]")
        assert in_chat == ("[assistant]" in text) and (in_chat or chat < 1) and not (in_chat and chat == 0)
        assert not in_chat or text.count("[user]") == facts
    assert rows == question_rows(tokenizer, TEXT, 4, **options)
    assert rows != question_rows(tokenizer, TEXT, 4, **{**options, "seed": seed + 1})


def test_rows_are_varied():
    tokenizer = bos_tokenizer()
    rows = question_rows(tokenizer, TEXT, 120, length=1500, facts=3)
    seen = {check(tokenizer, row, 3, 1500).fact for row in rows}
    assert len(seen) >= 12, "wordings"
    texts = [tokenizer.decode(row.ids) for row in rows]
    assert 40 <= sum("[user]" in text for text in texts) <= 80
    in_filler = sum(any(filler[:20] in text for filler in FILLERS) for text in texts)
    assert 15 <= in_filler <= 50
    assert len({tuple(answer for _, answer in answers_of(tokenizer, row)) for row in rows}) == 120


def test_facts_stand_between_sentences():
    for row in question_rows(bos_tokenizer(), TEXT, 30, length=1500, facts=3, chat=0, seed=3):
        text = bos_tokenizer().decode(row.ids)
        for wording in FACT_WORDINGS:
            for match in re.finditer(" " + pattern(wording.fact), text[: text.index("\n")]):
                assert text[: match.start()].endswith((".", "!", "?"))


@pytest.mark.parametrize("name", ["qwen3", "llama3", "gemma3", "phi3", "qwen2_5"])
def test_a_row_in_chat_is_what_the_template_makes_of_it(name):
    tokenizer = bos_tokenizer((TEMPLATES / f"{name}.jinja").read_text())
    (row,) = question_rows(tokenizer, TEXT, 1, length=1900, facts=3, chat=1, seed=5)
    text = tokenizer.decode(row.ids)
    wording = next(w for w in FACT_WORDINGS if re.search(pattern(w.question), text))
    replies = [m[0] for m in re.finditer(pattern(wording.reply), text[text.index(wording.question.split("{")[0]) :])]
    questions = [m[0] for m in re.finditer(pattern(wording.question), text)]
    empty = str(tokenizer.apply_chat_template([{"role": "user", "content": "=text="}], tokenize=False))
    begin = empty.split("=text=")[0]
    first = text[len(begin) : text.index(questions[0])] + questions[0]
    messages = [{"role": "user", "content": first}]
    for reply, question in itertools.zip_longest(replies[-3:], questions[1:]):
        messages += [{"role": "assistant", "content": reply}]
        messages += [{"role": "user", "content": question}] if question else []
    options = {"tokenize": False, "add_generation_prompt": True, "enable_thinking": False}
    shown = str(tokenizer.apply_chat_template(messages[:-1], **options)) + messages[-1]["content"]
    assert text == tokenizer.decode(tokenizer(shown, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize(
    ("options", "template", "message"),
    [
        ({"length": 300}, TEMPLATE, "length must leave room for text between 8 facts, which take .* got 300"),
        ({"chat": 1.5}, TEMPLATE, "chat must be a share from 0 to 1, got 1.5"),
        ({"chat": 0.5}, None, "no chat template, so this is a base model: use chat=0"),
        ({"length": 9000, "chat": 0}, None, "the texts hold 760 tokens together"),
    ],
)
def test_what_cannot_be_made_is_refused(options, template, message):
    with pytest.raises(ValueError, match=message):
        question_rows(bos_tokenizer(template), ["A short text. " * 18] * 3, 8, **{"length": 2000, "chat": 1, **options})


def words_of(text):
    return re.findall(r"[a-z]+", re.sub(r"\{\w+\}", " ", text).lower())


def runs(text, n=3):
    """Every `n` words that follow each other; a placeholder counts as a word."""
    words = re.findall(r"[a-z]+", re.sub(r"\{\w+\}", " x ", text).lower())
    return {tuple(words[i : i + n]) for i in range(len(words) - n + 1)}


def strings(record):
    return [value for value in vars(record).values() if isinstance(value, str) and " " in value]


SKILLED = [
    text
    for words in (*CHAINS, *VALUES, *COUNTS, *ORDERS, *COMPARISONS, *PASSAGES)
    for text in (*words.sentences, *(text for pair in words.asked.values() for text in pair))
]
OURS = [text for words in FACT_WORDINGS for text in strings(words)] + SKILLED


def of_ruler():
    """All strings of a few words in the code of RULER's tasks, as lm-eval has them: templates, needles, lists."""
    folder = Path(importlib.util.find_spec("lm_eval").origin).parent / "tasks" / "ruler"
    nodes = [node for file in sorted(folder.glob("*.py")) for node in ast.walk(ast.parse(file.read_text()))]
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return [text for text in texts if text.count(" ") >= 2]


@pytest.mark.parametrize("tasks", ["ours", "RULER's"])
def test_no_wording_is_shared_with_the_evaluation(tasks):
    theirs = [text for words in (*wordings.PASSKEY_WORDINGS, *wordings.NEEDLE_WORDINGS) for text in strings(words)]
    if tasks == "RULER's":
        theirs = of_ruler()
        assert {"magic", "VAR", "variables", "coded"} <= set(" ".join(theirs).split())
    ours = [*OURS, *FILLERS]
    shared = set().union(*map(runs, theirs)) & set().union(*map(runs, ours))
    assert not {run for run in shared if run.count("x") < 2}
    sentences = [
        {" ".join(words_of(part)) for part in re.split(r"[.!?:]", " ".join(texts))} for texts in (theirs, ours)
    ]
    assert not (sentences[0] & sentences[1]) - {""}


def test_no_key_is_shared_with_the_evaluation():
    keys = {*needles._ADJECTIVES, *needles._NOUNS}
    ours = {word for text in OURS for word in words_of(text)}
    assert not keys & ours
    assert not keys & {word for text in FILLERS for word in words_of(text)}
    made = {"".join(parts) for n in (2, 3) for parts in itertools.product(SYLLABLES, repeat=n)}
    assert not keys & made
    what = {"pass", "key", "secret", "code", "locker", "safe", "magic", "access", "ticket", "phone", "extension"}
    assert not what & ours


def test_each_wording_tells_asks_and_answers():
    assert len({words.question for words in FACT_WORDINGS}) == len(FACT_WORDINGS) >= 12
    for words in FACT_WORDINGS:
        assert [words.fact.count(part) for part in ("{name}", "{value}")] == [1, 1]
        assert words.question.count("{name}") == 1 and "{value}" not in words.question
        assert words.reply.count("{value}") == 1 and "{name}" in words.reply.split("{value}")[0]
    assert len({fact.question for fact in draw_facts(200, random.Random(0))}) == 200
