"""Questions that take more than one sentence to answer, one function for each skill."""

import random
import re
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise

from .facts import Question, draw_name, draw_value
from .row import Skill
from .skill_wordings import CHAINS, COMPARISONS, COUNTS, ORDERS, PASSAGES, VALUES, SkillWording

Asked = tuple[list[str], list[Question]]
"""Sentences to hide, in the order of the text, and questions in the order in which they are asked."""

GAP = "___"
_LEAST = 3  # sentences
_WORDS = range(4, 16)  # of a sentence that is asked about
_SENTENCE = re.compile(r"[A-Z][A-Za-z ,;'-]* [a-z]{3,}[.!?]")  # no quotation marks, and no end such as "Mr."


def draw_skill(skill: Skill, n: int, rng: random.Random) -> Asked:
    """`n` sentences in one wording, at least three, and questions about them; for all skills but "passage".

    Args:
        skill: "chain", n // 3 chains of names, of which each but the first refers to the one before it: all names that
            have a value, or the value of the last name. "values": all values of a name. "count": how many values a
            name has, a list of them, and the name that has most. "order": which name comes first, second, third or
            last, or earlier than another. "comparison": which name has the largest or the smallest number, or a larger
            one than another.
        n: sentences.
        rng: draws all.
    """
    return _DRAWS[skill](max(n, _LEAST), rng)


def _chain(n: int, rng: random.Random) -> Asked:
    wording = rng.choice(CHAINS)
    first, link = wording.sentences
    sizes = _parts(n, n // 3, 2, rng)  # names in each chain
    names = _different(n, lambda: draw_name(rng))
    values = _different(len(sizes), lambda: draw_value(wording.value, rng), names)
    hidden, questions = [], []
    for size, value in zip(sizes, values, strict=True):
        chain, names = names[:size], names[size:]  # the rest is of other chains
        links = [link.format(before=before, name=name) for before, name in pairwise(chain)]
        hidden.append([first.format(name=chain[0], value=value), *links])
        if rng.random() < 0.5:
            questions.append(_ask(wording, "names", _listed(chain), value=value))
        else:
            questions.append(_ask(wording, "value", value, name=chain[-1]))
    rng.shuffle(questions)
    # chains run through each other, and the links of each stay in order
    return _merged(hidden, rng), questions


def _values(n: int, rng: random.Random) -> Asked:
    wording, hidden, groups = _grouped(VALUES, n, rng)
    return hidden, [_ask(wording, "all", _listed(values), name=name) for name, values in groups]


def _count(n: int, rng: random.Random) -> Asked:
    wording, hidden, groups = _grouped(COUNTS, n, rng)
    questions = [_ask(wording, "most", max(groups, key=lambda group: len(group[1]))[0])]
    for name, values in groups:
        if rng.random() < 0.5:
            questions.append(_ask(wording, "number", str(len(values)), name=name))
        else:
            questions.append(_ask(wording, "list", f"{_listed(values)}, {len(values)} in all", name=name))
    rng.shuffle(questions)
    return hidden, questions


def _order(n: int, rng: random.Random) -> Asked:
    wording = rng.choice(ORDERS)
    names = _different(n, lambda: draw_name(rng))
    nth = {"first": 0, "second": 1, **({"third": 2} if n > 3 else {}), "last": -1}  # of three, the third is the last
    questions = [_ask(wording, "nth", names[nth[which]], nth=which) for which in rng.sample(list(nth), 2)]
    a, b = rng.sample(names, 2)
    questions.append(_ask(wording, "earlier", min(a, b, key=names.index), a=a, b=b))
    rng.shuffle(questions)
    return [wording.sentences[0].format(name=name) for name in names], questions


def _comparison(n: int, rng: random.Random) -> Asked:
    wording = rng.choice(COMPARISONS)
    names = _different(n, lambda: draw_name(rng))
    numbers = dict(zip(names, rng.sample(range(10, 1000 + n), n), strict=True))
    a, b = rng.sample(names, 2)
    questions = [
        _ask(wording, "largest", max(names, key=numbers.__getitem__)),
        _ask(wording, "smallest", min(names, key=numbers.__getitem__)),
        _ask(wording, "larger", max(a, b, key=numbers.__getitem__), a=a, b=b),
    ]
    rng.shuffle(questions)
    return [wording.sentences[0].format(name=name, value=value) for name, value in numbers.items()], questions


_DRAWS: dict[Skill, Callable[[int, random.Random], Asked]] = {
    "chain": _chain,
    "values": _values,
    "count": _count,
    "order": _order,
    "comparison": _comparison,
}


def n_passages(n: int) -> int:
    """Questions about the passages of a text that stands in place of one with `n` hidden sentences."""
    return max(n // 3, 1)


def draw_passages(text: str, n: int, rng: random.Random, near: str | None = None) -> list[Question]:
    """`n` questions about different sentences of a text: which one is the next, or which word is left out.

    Each is a sentence of 4 to 15 words that stands in the text once, and so is the next one.

    Args:
        text: running text; line breaks count as spaces.
        n: questions.
        rng: draws all.
        near: the beginning of `text` that the sentences are from; None means all of it.

    Returns:
        Fewer than `n` where the text has no more such sentences.
    """
    text, near = _one_line(text), _one_line(text if near is None else near)
    wording = rng.choice(PASSAGES)
    # the first and the last one may be parts of sentences
    sentences = re.split(r"(?<=[.!?]) ", near)[1:-1]
    pairs = [pair for pair in pairwise(sentences) if all(_is_plain(s) and text.count(s) == 1 for s in pair)]
    questions = []
    for sentence, following in rng.sample(pairs, min(n, len(pairs))):
        gaps = _gaps(text, sentence)
        if gaps and rng.random() < 0.5:
            word = rng.choice(gaps)
            questions.append(_ask(wording, "missing", word, quote=re.sub(rf"\b{word}\b", GAP, sentence)))
        else:
            questions.append(_ask(wording, "next", following, quote=sentence))
    return questions


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _is_plain(sentence: str) -> bool:
    return _SENTENCE.fullmatch(sentence) is not None and len(sentence.split()) in _WORDS


def _gaps(text: str, sentence: str) -> list[str]:
    """Words of five letters or more that no other word of the text could stand for in `sentence`."""
    words = re.findall(r"[A-Za-z]+", sentence)
    gaps = []
    for word in words:
        if len(word) >= 5 and words.count(word) == 1:
            before, behind = re.split(rf"\b{word}\b", sentence)
            if len(re.findall(rf"{re.escape(before)}\S+{re.escape(behind)}", text)) == 1:
                gaps.append(word)
    return gaps


def _ask(wording: SkillWording, what: str, answer: str, **names: str) -> Question:
    question, reply = wording.asked[what]
    return Question.of(question, reply, answer, **names)


def _grouped(
    wordings: Sequence[SkillWording], n: int, rng: random.Random
) -> tuple[SkillWording, list[str], list[tuple[str, list[str]]]]:
    """A wording, `n` sentences of it, and each name with its values in the order of the text; one name has most."""
    wording = rng.choice(wordings)
    sizes = [0, 0]
    while sizes.count(max(sizes)) > 1:  # until one name has most values
        sizes = _parts(n, max(n // 3, 2), 1, rng)
    names = _different(len(sizes), lambda: draw_name(rng))
    values = _different(n, lambda: draw_value(wording.value, rng), names)
    groups = []
    for name, size in zip(names, sizes, strict=True):
        groups.append((name, values[:size]))
        values = values[size:]  # of the other names
    hidden = [[wording.sentences[0].format(name=name, value=value) for value in group] for name, group in groups]
    return wording, _merged(hidden, rng), groups


def _parts(n: int, k: int, least: int, rng: random.Random) -> list[int]:
    """`k` sizes of at least `least`, `n` in all."""
    sizes = [least] * k
    for _ in range(n - k * least):
        sizes[rng.randrange(k)] += 1
    return sizes


def _merged(groups: Sequence[Sequence[str]], rng: random.Random) -> list[str]:
    """All sentences in random order, those of a group in their own."""
    order = [number for number, group in enumerate(groups) for _ in group]
    rng.shuffle(order)
    left = [iter(group) for group in groups]
    return [next(left[number]) for number in order]


def _different(n: int, draw: Callable[[], str], but: Collection[str] = ()) -> list[str]:
    """`n` different draws, none of them in `but`."""
    drawn: list[str] = []
    while len(drawn) < n:
        word = draw()
        if word not in drawn and word not in but:
            drawn.append(word)
    return drawn


def _listed(words: Sequence[str]) -> str:
    """The words as `A, B and C`."""
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))
