"""Wordings of facts in training rows, of their questions and answers.

`rope_patch.eval` asks in other words, and its keys and haystacks are others: what a model learns here must not be the
wording of a test.
"""

from dataclasses import dataclass
from typing import Literal

ValueKind = Literal["number", "year", "code", "time", "word"]


@dataclass(frozen=True)
class FactWording:
    """One wording of a fact that gives `{name}` the `{value}`.

    Args:
        fact: the sentence that is hidden in a text; the value stands in it once.
        question: what is asked.
        reply: the sentence that answers it. What comes before `{value}` is given, the rest is the answer.
        value: what kind of value is drawn.
    """

    fact: str
    question: str
    reply: str
    value: ValueKind


def _same(sentence: str, question: str, value: ValueKind) -> FactWording:
    return FactWording(sentence, question, sentence, value)


FACT_WORDINGS = (
    _same("Parcel {name} weighs {value} grams.", "How many grams does parcel {name} weigh?", "number"),
    _same("In {name}, {value} people were counted.", "How many people were counted in {name}?", "number"),
    _same("{name} was founded with {value} coins.", "With how many coins was {name} founded?", "number"),
    _same("The badge of {name} reads {value}.", "What does the badge of {name} read?", "code"),
    _same("The ferry to {name} leaves at {value}.", "When does the ferry to {name} leave?", "time"),
    _same("{name} lives at {value} Mill Lane.", "Where on Mill Lane does {name} live?", "number"),
    _same("Flight {name} departs from gate {value}.", "From which gate does flight {name} depart?", "code"),
    _same("A barrel of {name} costs {value} pence.", "What does a barrel of {name} cost?", "number"),
    _same("The wine called {name} was bottled in {value}.", "When was the wine called {name} bottled?", "year"),
    _same("Mount {name} is {value} feet high.", "How high is Mount {name}?", "number"),
    _same("{name} paid {value} crowns for the horse.", "How many crowns did {name} pay for the horse?", "number"),
    _same("{name} has the family name {value}.", "What family name does {name} have?", "word"),
    _same("{name} is twinned with the town {value}.", "With which town is {name} twinned?", "word"),
    FactWording(
        "Remarkably, {name} stands for {value}.", "What does {name} stand for?", "{name} stands for {value}.", "number"
    ),
    FactWording(
        "Whoever writes to {name} should quote {value}.",
        "What should one quote when writing to {name}?",
        "When writing to {name}, one should quote {value}.",
        "code",
    ),
    FactWording(
        "Nobody but {value} could ever beat {name} at chess.",
        "Who beat {name} at chess?",
        "{name} was beaten at chess by {value}.",
        "word",
    ),
)

# short text to hide facts in, repeated: a fact stands out less in a book than in these, and both are met in use
FILLERS = (
    "The stream turns the old mill. Ducks sleep on the bank. A cart rolls past. Nothing else happens. ",
    "Snow falls on the roof. The clock ticks. Somebody coughs. It is getting late. ",
    "One, two, three, four. Five, six, seven, eight. Nine and ten. Then again from one. ",
    "The baker lights the oven. Flour lies everywhere. His son sweeps the floor. Bread is all they think of. ",
)
