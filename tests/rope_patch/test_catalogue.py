"""What is read of a class and its docstring."""

from dataclasses import dataclass, field

from rope_patch.catalogue import Option, method, option_classes, options_of


@dataclass
class Own:
    """r(t) = t / pace.

    A second paragraph.

    Args:
        pace: how fast: in positions
            a token.
        marks: where it stops.

    Raises:
        ValueError: never.

    When: Take it to go
        slowly.

    Source: Walking, arXiv:2401.00001, and running, arXiv:2401.00002.
    """

    pace: float
    marks: list[int] = field(default_factory=lambda: [1])
    unexplained: int | None = None
    found: int = field(default=3, init=False)

    synonyms = ("walk",)


def test_a_docstring_is_read_by_its_sections():
    found = method("view", "own", Own)
    assert found.what == "r(t) = t / pace.\n\nA second paragraph."
    assert found.when == "Take it to go slowly." and found.synonyms == ("walk",)
    assert found.source == "Walking, arXiv:2401.00001, and running, arXiv:2401.00002."
    assert found.papers == ["https://arxiv.org/abs/2401.00001", "https://arxiv.org/abs/2401.00002"]


def test_options_are_fields_with_default_and_meaning():
    assert options_of(Own) == [
        Option("pace", None, "how fast: in positions a token."),
        Option("marks", "[1]", "where it stops."),
        Option("unexplained", "None", ""),
    ]


def test_an_option_that_is_a_dataclass_is_followed_by_what_it_holds():
    @dataclass
    class Walk:
        own: Own | None = None

    names = ["own", "own.pace", "own.marks", "own.unexplained"]
    assert [option.name for option in options_of(Walk)] == names and option_classes(Walk) == {"own": Own}


def test_meanings_are_those_of_the_bases_too():
    @dataclass
    class Slower(Own):
        """Slower.

        Args:
            marks: where it rests.
        """

        marks: list[int] = field(default_factory=list)

    assert [option.meaning for option in options_of(Slower)][:2] == [
        "how fast: in positions a token.",
        "where it rests.",
    ]


def test_a_class_without_a_docstring_has_no_words():
    class Bare:
        pass

    assert method("view", "bare", Bare, ()) == method("view", "bare", Bare, [])
    assert not method("view", "bare", Bare, ()).what
