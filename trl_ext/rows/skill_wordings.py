"""Wordings of the rows that teach a skill: sentences to hide, and questions that take several of them to answer.

They are none of RULER's, nor of `rope_patch.eval`'s other prompts.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from .wordings import ValueKind


@dataclass(frozen=True)
class SkillWording:
    """One wording of a skill.

    Args:
        sentences: what is hidden, with placeholders.
        asked: what is asked -> its question and its reply. What comes before `{answer}` is given, the rest is labelled.
        value: what kind of value is drawn.
    """

    sentences: tuple[str, ...]
    asked: Mapping[str, tuple[str, str]]
    value: ValueKind = "word"


# hidden: how a chain begins, and a link of it. Asked: its names in order, or what its last name has
CHAINS = (
    SkillWording(
        ("Crate {value} was first brought to {name}.", "Whatever {before} had was sent on to {name}."),
        {
            "names": ("Who had crate {value}, one after another?", "Crate {value} was with {answer}."),
            "value": ("Which crate has reached {name}?", "The crate that reached {name} is {answer}."),
        },
        "code",
    ),
    SkillWording(
        ("{name} joined the mill in {value}.", "{name} joined the mill together with {before}."),
        {
            "names": ("Who joined the mill in {value}?", "Those who joined the mill in {value} are {answer}."),
            "value": ("In which year did {name} join the mill?", "{name} joined the mill in {answer}."),
        },
        "year",
    ),
    SkillWording(
        ("{name} pays {value} crowns of rent.", "{name} pays just as much as {before}."),
        {
            "names": ("Who pays {value} crowns of rent?", "A rent of {value} crowns is paid by {answer}."),
            "value": ("How many crowns of rent does {name} pay?", "{name} pays {answer} crowns of rent."),
        },
        "number",
    ),
    SkillWording(
        ("The rumour about bridge {value} began with {name}.", "All that {before} knew was soon known to {name}."),
        {
            "names": (
                "Who knew the rumour about bridge {value}?",
                "Those who knew it are {answer}.",
            ),
            "value": ("About which bridge did {name} know a rumour?", "{name} knew a rumour about bridge {answer}."),
        },
        "code",
    ),
    SkillWording(
        ("One {name} is {value} inches long.", "One {name} is as long as one {before}."),
        {
            "names": ("Which measures are {value} inches long?", "The measures of {value} inches are {answer}."),
            "value": ("How many inches long is one {name}?", "One {name} is {answer} inches long."),
        },
        "number",
    ),
)

# hidden: one of several values of a name. Asked: all of them, in the order of the text
VALUES = (
    SkillWording(
        ("{name} once met {value} at the market.",),
        {"all": ("Whom did {name} meet at the market?", "At the market, {name} met {answer}.")},
    ),
    SkillWording(
        ("A coach to {name} leaves at {value}.",),
        {"all": ("At which hours do coaches leave for {name}?", "Coaches to {name} leave at {answer}.")},
        "time",
    ),
    SkillWording(
        ("The {name} family bought field {value}.",),
        {"all": ("Which fields did the {name} family buy?", "The {name} family bought {answer}.")},
        "code",
    ),
    SkillWording(
        ("The river {name} froze in {value}.",),
        {"all": ("In which years did the river {name} freeze?", "The river {name} froze in {answer}.")},
        "year",
    ),
    SkillWording(
        ("{name} won a race with {value} points.",),
        {"all": ("With how many points did {name} win races?", "{name} won races with {answer} points.")},
        "number",
    ),
)

# hidden: one of several values of a name. Asked: their number, a list with it, and the name that has most of them
COUNTS = (
    SkillWording(
        ("{value} cast a vote for {name}.",),
        {
            "number": ("How many votes did {name} get?", "The votes for {name} number {answer}."),
            "list": ("Who voted for {name}, and how many are they?", "Votes for {name} came from {answer}."),
            "most": ("Who won the vote?", "The vote was won by {answer}."),
        },
    ),
    SkillWording(
        ("{value} became a member of the {name} guild.",),
        {
            "number": ("How many joined the {name} guild?", "Those in the {name} guild number {answer}."),
            "list": ("Who joined the {name} guild, and how many are they?", "The {name} guild took in {answer}."),
            "most": ("Which guild has more members than any other?", "The largest guild is {answer}."),
        },
    ),
    SkillWording(
        ("Barrel {value} came from the vineyard of {name}.",),
        {
            "number": ("How many barrels came from {name}?", "The barrels of {name} number {answer}."),
            "list": ("Which barrels came from {name}, and how many are they?", "From {name} came {answer}."),
            "most": ("Whose vineyard sent more barrels than any other?", "More barrels than any other sent {answer}."),
        },
        "code",
    ),
    SkillWording(
        ("At {value}, the bell of {name} rang.",),
        {
            "number": ("How often did the bell of {name} ring?", "The times when {name} rang number {answer}."),
            "list": ("When did the bell of {name} ring, and how often?", "The bell of {name} rang at {answer}."),
            "most": ("Whose bell was the busiest of all?", "The busiest bell was that of {answer}."),
        },
        "time",
    ),
)

# hidden: names, one by one. Asked: the first, second, third or last one, and which of two came earlier
ORDERS = (
    SkillWording(
        ("{name} crossed the old bridge.",),
        {
            "nth": ("Who was the {nth} to cross the old bridge?", "The {nth} to cross it was {answer}."),
            "earlier": ("Who crossed the old bridge earlier, {a} or {b}?", "It was crossed earlier by {answer}."),
        },
    ),
    SkillWording(
        ("Then came a letter from {name}.",),
        {
            "nth": ("From whom was the {nth} letter?", "The {nth} letter came from {answer}."),
            "earlier": ("Who sent the earlier letter, {a} or {b}?", "The earlier letter came from {answer}."),
        },
    ),
    SkillWording(
        ("The train now stopped in {name}.",),
        {
            "nth": ("In which town did the train make its {nth} stop?", "Its {nth} stop was in {answer}."),
            "earlier": ("In which town did the train stop earlier, {a} or {b}?", "It stopped earlier in {answer}."),
        },
    ),
    SkillWording(
        ("A toast was drunk to {name}.",),
        {
            "nth": ("To whom was the {nth} toast drunk?", "The {nth} toast was to {answer}."),
            "earlier": ("Whose toast was drunk earlier, that to {a} or to {b}?", "The earlier toast was to {answer}."),
        },
    ),
)

# hidden: a name and a number. Asked: the name with the largest or the smallest, and which of two has the larger one
COMPARISONS = (
    SkillWording(
        ("The {name} tower has {value} steps.",),
        {
            "largest": ("Which tower has the most steps?", "The tower with the most steps is {answer}."),
            "smallest": ("Which tower has the fewest steps?", "The tower with the fewest steps is {answer}."),
            "larger": ("Which tower has more steps, {a} or {b}?", "The tower with more steps is {answer}."),
        },
    ),
    SkillWording(
        ("The ship {name} carries {value} sacks.",),
        {
            "largest": ("Which ship carries the most sacks?", "Most sacks are on {answer}."),
            "smallest": ("Which ship carries the fewest sacks?", "The fewest sacks are on {answer}."),
            "larger": ("Which ship carries more sacks, {a} or {b}?", "Of both, more sacks are on {answer}."),
        },
    ),
    SkillWording(
        ("The pig {name} weighs {value} pounds.",),
        {
            "largest": ("Which pig is the heaviest?", "The heaviest pig is {answer}."),
            "smallest": ("Which pig is the lightest?", "The lightest pig is {answer}."),
            "larger": ("Which pig is heavier, {a} or {b}?", "The heavier pig is {answer}."),
        },
    ),
    SkillWording(
        ("The journey to {name} takes {value} hours.",),
        {
            "largest": ("Where does the longest journey go?", "The longest journey goes to {answer}."),
            "smallest": ("Where does the shortest journey go?", "The shortest journey goes to {answer}."),
            "larger": ("Is the journey to {a} or to {b} longer?", "The longer journey is to {answer}."),
        },
    ),
)

# nothing is hidden. Asked: the sentence that follows another one, and a word that is left out of one
PASSAGES = (
    SkillWording(
        (),
        {
            "next": ('Which sentence follows this one? "{quote}"', "It is followed by: {answer}"),
            "missing": ('Which word is left out here? "{quote}"', "The word is {answer}."),
        },
    ),
    SkillWording(
        (),
        {
            "next": ('The story says: "{quote}" How does it go on?', "It goes on like this: {answer}"),
            "missing": ('The story says: "{quote}" Fill the gap.', "The gap is filled by {answer}."),
        },
    ),
    SkillWording(
        (),
        {
            "next": ('Write down what stands right behind "{quote}"', "Right behind it stands: {answer}"),
            "missing": ('Write down the word that belongs in "{quote}"', "There belongs {answer}."),
        },
    ),
    SkillWording(
        (),
        {
            "next": ('I have read up to "{quote}" Read on for me.', "Reading on: {answer}"),
            "missing": ('I cannot make out one word of "{quote}" Help me.', "It should be {answer}."),
        },
    ),
)
