"""Rows that teach a skill: whoever reads the text alone finds the answers, by other code than wrote them."""

import random
import re
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.asked_rows import answers_of, bos_tokenizer

from trl_ext.rows import make_rows, question_rows
from trl_ext.rows.row import SKILLS
from trl_ext.rows.skill_wordings import CHAINS, COMPARISONS, COUNTS, ORDERS, PASSAGES, VALUES
from trl_ext.rows.skills import draw_passages, draw_skill

WORDINGS = {
    "chain": CHAINS,
    "values": VALUES,
    "count": COUNTS,
    "order": ORDERS,
    "comparison": COMPARISONS,
    "passage": PASSAGES,
}
LENGTH = 4000


def story(n, seed):
    """`n` sentences, all different, of four to nine made-up words; a line ends within some, and some are quoted."""
    rng = random.Random(seed)
    words = ["".join(rng.choice("aeiou") + rng.choice("bdfgkmt") for _ in range(rng.randint(1, 4))) for _ in range(900)]
    sentences = []
    for number in range(n):
        said = rng.sample(words, rng.randint(4, 9))
        said[2] += "\n" if number % 5 == 0 else ""
        sentence = " ".join(said).replace("\n ", "\n").capitalize() + rng.choice(".!?")
        sentences.append(f'"{sentence}"' if number % 7 == 0 else sentence)
    return " ".join(sentences)


TEXTS = [story(300, seed) for seed in range(3)]


def pattern(template):
    """A regex of a template, with a group for each of its placeholders."""
    parts = [re.escape(part) if i % 2 == 0 else part for i, part in enumerate(re.split(r"\{(\w+)\}", template))]
    of = {"quote": '[^"]+'}
    parts[1::2] = [f"(?P<{part}>{of.get(part, '[A-Za-z0-9:]+')})" for part in parts[1::2]]
    return "".join(parts)


def listed(words):
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def chain(told, what, asked):
    value_of = {fact["name"]: fact["value"] for fact in told if "value" in fact}
    before = {fact["name"]: fact["before"] for fact in told if "before" in fact}
    assert len(value_of) + len(before) == len(told)

    def way(name):
        return [*way(before[name]), name] if name in before else [name]

    if what == "value":
        assert asked["name"] not in before.values(), "the last one"
        return value_of[way(asked["name"])[0]]
    return listed(max((way(n) for n in before if value_of[way(n)[0]] == asked["value"]), key=len))


def values(told, what, asked):
    return listed([fact["value"] for fact in told if fact["name"] == asked["name"]])


def count(told, what, asked):
    (most, n), (_, fewer) = Counter(fact["name"] for fact in told).most_common(2)
    assert n > fewer
    if what == "most":
        return most
    those = [fact["value"] for fact in told if fact["name"] == asked["name"]]
    return str(len(those)) if what == "number" else f"{listed(those)}, {len(those)} in all"


def order(told, what, asked):
    names = [fact["name"] for fact in told]
    if what == "nth":
        return names[{"first": 0, "second": 1, "third": 2, "last": len(names) - 1}[asked["nth"]]]
    return next(name for name in names if name in (asked["a"], asked["b"]))


def comparison(told, what, asked):
    numbers = sorted((int(fact["value"]), fact["name"]) for fact in told)
    assert len({number for number, _ in numbers}) == len(numbers)
    if what == "larger":
        numbers = [(number, name) for number, name in numbers if name in (asked["a"], asked["b"])]
    return numbers[0 if what == "smallest" else -1][1]


SOLVERS = {"chain": chain, "values": values, "count": count, "order": order, "comparison": comparison}


def read_on(text, what, asked):
    """The answer to a question about a passage."""
    text = " ".join(text.split())
    if what == "next":
        assert text.count(asked["quote"]) == 1
        behind = text[text.index(asked["quote"]) + len(asked["quote"]) + 1 :]
        return re.match(r".+?[.!?](?= |$)", behind)[0]
    before, behind = asked["quote"].split("___")
    (word,) = re.findall(rf"{re.escape(before)}(\w+){re.escape(behind)}", text)
    return word


def solve(tokenizer, row, skill, n):
    """Compare the labelled answers of a row with what its text says; returns (wording, what is asked) of each."""
    assert row.kind == skill and len(row.ids) == len(row.labelled) == LENGTH and row.ids.count(1) == 1
    seen, text, told = [], None, []
    answers = answers_of(tokenizer, row)
    assert len(answers) >= 1
    for before, answer in answers:
        # the last question is the one that this answers
        found = [
            (match.end(), number, what, match.groupdict(), reply)
            for number, wording in enumerate(WORDINGS[skill])
            for what, (question, reply) in wording.asked.items()
            for match in re.finditer(pattern(question), before)
        ]
        end, number, what, asked, reply = max(found, key=lambda each: each[0])
        if text is None:
            first = min(m.start() for m in re.finditer(pattern(WORDINGS[skill][number].asked[what][0]), before))
            text = before[:first]
            templates = WORDINGS[skill][number].sentences
            told = [(m.start(), m.groupdict()) for each in templates for m in re.finditer(" " + pattern(each), text)]
            told = [fact for _, fact in sorted(told, key=lambda each: each[0])]
            assert len(told) == (0 if skill == "passage" else max(n, 3))
        lead, rest = reply.split("{answer}")
        assert before[end:].endswith(lead.format(**asked).rstrip())
        right = read_on(text, what, asked) if skill == "passage" else SOLVERS[skill](told, what, asked)
        assert answer == f" {right}{rest}"
        seen.append((number, what))
    assert len({number for number, _ in seen}) == 1, "one wording a row"
    assert not re.search("[{}]", tokenizer.decode(row.ids))
    return seen


@pytest.mark.parametrize("skill", SKILLS)
@settings(max_examples=7, deadline=None)
@given(seed=st.integers(0, 10**6), n=st.integers(1, 9), chat=st.sampled_from([0.0, 0.5, 1.0]))
def test_a_reader_of_the_text_finds_the_labelled_answers(skill, seed, n, chat):
    tokenizer = bos_tokenizer()
    options = {"length": LENGTH, "kind": skill, "facts": n, "chat": chat}
    rows = question_rows(tokenizer, TEXTS, 3, **options, seed=seed)
    for row in rows:
        solve(tokenizer, row, skill, n)
    assert rows == question_rows(tokenizer, TEXTS, 3, **options, seed=seed)
    assert rows != question_rows(tokenizer, TEXTS, 3, **options, seed=seed + 1)


@pytest.mark.parametrize("skill", SKILLS)
def test_a_skill_is_asked_in_all_its_wordings(skill):
    tokenizer = bos_tokenizer()
    rows = question_rows(tokenizer, TEXTS, 70, length=LENGTH, kind=skill, facts=8, chat=0)
    seen = {each for row in rows for each in solve(tokenizer, row, skill, 8)}
    every = {(number, what) for number, wording in enumerate(WORDINGS[skill]) for what in wording.asked}
    assert seen == every and len(WORDINGS[skill]) >= 4
    assert len({question for wording in WORDINGS[skill] for question, _ in wording.asked.values()}) == len(every)


@pytest.mark.parametrize("skill", ["chain", "values"])
def test_sentences_of_one_list_lie_between_those_of_another(skill):
    """Where they stood together, reading on from the first one would be enough."""
    apart = 0
    for seed in range(30):
        told, questions = draw_skill(skill, 8, random.Random(seed))
        for listed in (re.findall(r"[A-Z0-9][\w:]+", q.answer) for q in questions if " and " in q.answer):
            places = [next(i for i, one in enumerate(told) if re.search(rf"\b{word}\b", one)) for word in listed]
            apart += places[-1] - places[0] >= len(listed)
    assert apart > 10


def test_sentences_that_could_be_mistaken_are_not_asked_about():
    once = "Nobody had seen the lantern since. Every path led to the river."
    twice = "They went home before dark. They went home before noon."
    texts = ["A start.", once, "So it was.", twice, "He met Mr.", "Smith in the old mill.", twice, "An end"]
    asked = [q for seed in range(60) for q in draw_passages("\n".join(texts), 5, random.Random(seed))]
    quotes = {re.search(r'"(.+?)"', question.question)[1] for question in asked}
    plain = "Nobody had seen the lantern since."
    assert quotes == {plain, *(plain.replace(word, "___") for word in ("Nobody", "lantern", "since"))}


def test_a_gap_has_one_word_that_fits():
    text = (
        "Here. They were happy in spring. They were happy in autumn. It rained the whole day. "
        "Every river feeds another river there. So the water went away. End."
    )
    asked = [q for seed in range(60) for q in draw_passages(text, 9, random.Random(seed))]
    gaps = {re.search(r'"(.+?)"', q.question)[1] for q in asked if "___" in q.question}
    assert {gap for gap in gaps if "They" in gap} == {f"They were ___ in {when}." for when in ("spring", "autumn")}
    assert any("feeds" in gap for gap in gaps) and all(gap.count("river") != 1 for gap in gaps)


def test_texts_without_plain_sentences_get_plain_questions():
    """As code or Chinese does, so that every text makes the rows that are the default."""
    (row,) = question_rows(bos_tokenizer(), ["One, two. Three! " * 400], 1, length=900, kind="passage", facts=2)
    assert row.kind == "questions" and len(row.ids) == 900 and sum(row.labelled) > 8


def test_rows_of_other_kinds_stay_the_same_when_a_skill_is_left_out():
    """An ablation changes nothing else: the rows that plain questions take its place with are more of the same."""

    def made(**shares):
        options = {"length": LENGTH, "texts": TEXTS, "facts": 4, "chats": [[1, 50, 51]], "short": 0.25}
        rows = make_rows(bos_tokenizer(), 12, shares=shares, progress=False, **options)
        return Counter((row.kind, len(row.ids), tuple(row.ids)) for row in rows)

    skills = dict.fromkeys(SKILLS, 1)
    every = made(text=2, chats=2, questions=2, **skills)
    without = made(text=2, chats=2, questions=3, **{**skills, "order": 0})
    added, gone = without - every, every - without
    assert {kind for kind, _, _ in added} == {"questions"} and {kind for kind, _, _ in gone} == {"order"}
    assert {sum(length * n for (_, length, _), n in rows.items()) for rows in (every, without)} == {12 * LENGTH}
    assert {kind for kind, _, _ in every} == {"text", "chats", "questions", *SKILLS}
