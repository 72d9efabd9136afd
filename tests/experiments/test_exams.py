"""What an exam asks can be answered from the text, and only right answers count."""

import random
import re
from types import SimpleNamespace

import pytest
import torch
from exams import KINDS, NEEDLES, accuracy, make_exam, needle_exam
from support.characters import character_tokenizer
from support.tiny import tiny

SENTENCE = re.compile(r" The special magic number for (\S+) is: (\d+)\.")
QUESTION = re.compile(r"What is the ?(\S*) special magic number for (\S+) mentioned in the text above\? It is: (\d+)\.")
ORDINALS = ["first", "second", "third", "fourth", "fifth", "last"]
LENGTH = 6000


def exam(kind, seed=0):
    tokenizer = character_tokenizer()
    text = tokenizer("it was a dark night; " * 400, add_special_tokens=False)["input_ids"]
    made = make_exam(kind, tokenizer, text, LENGTH, 200, random.Random(seed))
    return tokenizer, made, tokenizer.decode(made.ids)


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_has_the_answers(kind):
    tokenizer, made, text = exam(kind)
    assert len(made.ids) == LENGTH and len(made.answers) == len(made.depths) == 8
    facts = [(m.start(), *m.groups()) for m in SENTENCE.finditer(text)]
    questions = QUESTION.findall(text)
    assert len(facts) == (30 if kind == "multikey" else 18) and len(questions) == 8
    for (which, key, value), (first, end), depth in zip(questions, made.answers, made.depths, strict=True):
        of_key = [(place, v) for place, k, v in facts if k == key]
        place, right = of_key[ORDINALS.index(which) if kind == "ordinal" else 0]
        assert len(of_key) == (6 if kind == "ordinal" else 1)
        assert value == right and depth == place / LENGTH
        assert tokenizer.decode(made.ids[first:end]) == f" {value}."
    assert sum(made.answered) == 8 * len(" 1234567.")


def test_exams_depend_on_the_generator_alone():
    assert exam("ordinal")[1] == exam("ordinal")[1] != exam("ordinal", seed=1)[1]


@pytest.mark.parametrize("wrong", [None, 0, 5])
def test_an_answer_is_right_when_all_of_its_tokens_are(wrong):
    _, made, _ = exam("multikey")
    right = torch.tensor(made.ids)
    if wrong is not None:
        right[made.answers[wrong][1] - 3] += 1

    class Oracle:
        device = torch.device("cpu")
        training = False

        def __call__(self, ids, use_cache, logits_to_keep):
            """The most probable token at each place is the one that `right` has behind it."""
            assert ids.tolist() == [made.ids]
            return SimpleNamespace(logits=torch.nn.functional.one_hot(right[logits_to_keep + 1], 5000)[None].float())

    graded = accuracy(Oracle(), made)
    assert [d for d, _ in graded] == made.depths
    assert [ok for _, ok in graded] == [i != wrong for i in range(8)]


@pytest.mark.parametrize("kind", NEEDLES)
@pytest.mark.parametrize("depth", [0.05, 0.95])
def test_of_a_needle_the_digits_are_graded(kind, depth):
    tokenizer = character_tokenizer()
    haystack = tokenizer("it was a dark night. " * 200, add_special_tokens=False)["input_ids"]
    made = needle_exam(kind, tokenizer, haystack, 3000, depth, random.Random(0))
    text = tokenizer.decode(made.ids)
    ((first, end),) = made.answers
    number = tokenizer.decode(made.ids[first:end])
    assert len(made.ids) == end <= 3000 and number.isdigit() and len(number) == (5 if kind == "passkey" else 7)
    needle = text[round(made.depths[0] * end) :]
    said = re.match(r" The (pass key|special magic number for \S+) is:? (\d+)\.", needle)
    assert said[2] == number and said[1].lower() in text[-200:].lower()
    assert text.count(" The special magic number for ") == (0 if kind == "passkey" else 5)
    assert (
        abs(made.depths[0] - depth) < 0.15
    )  # in characters, the question of multiquery, which shares these places, is long


def test_no_exam_is_graded_in_training_mode():
    tokenizer = character_tokenizer()
    model = tiny(vocab_size=len(tokenizer)).train()
    with pytest.raises(ValueError, match=r"call model.eval\(\) first"):
        accuracy(model, needle_exam("passkey", tokenizer, [40] * 1000, 1000, 0.5, random.Random(0)))


def test_too_many_sentences_are_refused():
    tokenizer = character_tokenizer()
    with pytest.raises(ValueError, match="use more spacing"):
        make_exam("multikey", tokenizer, [1] * 3000, 3000, 20, random.Random(0))
