"""Wordings of retrieval prompts: a skill should not depend on one of them."""

from dataclasses import dataclass

# the haystack of Landmark Attention's passkey task, as PoSE, LongLoRA and PosAug use it
PASSKEY_FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "


@dataclass(frozen=True)
class PasskeyWording:
    """One wording of the passkey task.

    Args:
        filler: sentences that are repeated around the needle.
        needle: the sentences with the number, `{key}`.
        question: the question.
        beginning: the beginning of the answer, up to the number.
    """

    filler: str
    needle: str
    question: str
    beginning: str


@dataclass(frozen=True)
class NeedleWording:
    """One wording of needles in other text. A needle gives a number, `{value}`, of a name, `{key}`.

    Args:
        only: the needle of a name with one number.
        one_of: a needle of a name with several numbers.
        number: what the number is called, after "the" or "the second".
        numbers: the plural.
        of: the words between number and name.
        question: the question; `{be}` is "is" or "are", `{asked}` e.g. "all the access codes of amber-anchor".
        beginning: the beginning of the answer; `{asked}` has no "all" here, and `{Asked}` begins with a capital letter.
    """

    only: str
    one_of: str
    number: str
    numbers: str
    of: str
    question: str
    beginning: str


# the first one is Landmark Attention's
PASSKEY_WORDINGS = (
    PasskeyWording(
        PASSKEY_FILLER,
        "The pass key is {key}. Remember it. {key} is the pass key.",
        "\nWhat is the pass key?",
        "The pass key is",
    ),
    PasskeyWording(
        "It rained all day. The train was late again. People stood on the platform and read. Nobody said a word. ",
        "Keep this secret code in mind: {key}. The secret code is {key}.",
        "\nOne sentence above names a secret code. Which number is it?",
        "The secret code is",
    ),
    PasskeyWording(
        "The river runs down to the sea. A boat comes in. Gulls cry over the harbour. The tide turns at noon. ",
        "Note that your locker has number {key}. Your locker is number {key}, do not forget it.",
        "\nWhich locker is mine? Give me its number.",
        "Your locker is number",
    ),
    PasskeyWording(
        "She cut the bread and poured the tea. He fed the cat. They sat by the fire. Then they did it all once more. ",
        "By the way, {key} is the number to open the safe. To open the safe, enter {key}.",
        "\nAccording to the text, what must I enter to open the safe?",
        "To open the safe, enter",
    ),
)

PASSKEY_OF = PasskeyWording(
    PASSKEY_FILLER,
    "The pass key of {name} is {key}. Remember it. {key} is the pass key of {name}.",
    "\nWhat is the pass key of {name}?",
    "The pass key of {name} is",
)
"""The first wording, for a text with the pass keys of several people."""

# the first one is RULER's
NEEDLE_WORDINGS = (
    NeedleWording(
        "The special magic number for {key} is: {value}.",
        "One of the special magic numbers for {key} is: {value}.",
        "special magic number",
        "special magic numbers",
        "for",
        "\nWhat {be} {asked} mentioned in the text above?",
        "{Asked} {be}:",
    ),
    NeedleWording(
        "The access code of {key} is {value}.",
        "{value} is one access code of {key}.",
        "access code",
        "access codes",
        "of",
        "\nOnly the text above can tell: what {be} {asked}?",
        "{Asked} {be}",
    ),
    NeedleWording(
        "Somebody had noted that {key} holds ticket number {value}.",
        "Somebody had noted that {key} holds, among others, ticket number {value}.",
        "ticket number",
        "ticket numbers",
        "held by",
        "\nPlease read the text again. According to it, what {be} {asked}?",
        "According to the text, {asked} {be}",
    ),
    NeedleWording(
        "Dial {value}, the phone extension of {key}.",
        "Dial {value}, a phone extension of {key}.",
        "phone extension",
        "phone extensions",
        "of",
        "\nI need {asked}, as given somewhere in the text.",
        "{Asked} {be}",
    ),
)

N_WORDINGS = len(PASSKEY_WORDINGS)
assert len(NEEDLE_WORDINGS) == N_WORDINGS  # an index means one wording of each task
