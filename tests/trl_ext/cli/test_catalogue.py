"""What is read of a class in a source file, beside what Python makes of the same class."""

from dataclasses import MISSING, dataclass, field, fields

import pytest

from rope_patch import views
from rope_patch.rescalings import RESCALINGS
from rope_patch.views import VIEWS, View
from trl_ext.cli.catalogue import Option, methods
from trl_ext.objectives import OBJECTIVES

KINDS = {"view": VIEWS, "rescaling": RESCALINGS, "objective": OBJECTIVES}


@pytest.fixture
def walking():
    @VIEWS.register("walking")
    @dataclass(frozen=True)
    class Walking(View):
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
        marks: list[int] = field(default_factory=list)
        unexplained: int | None = None
        found: int = field(default=3, init=False)

        synonyms = ("walk",)

    yield next(method for method in methods() if method.name == "walking")
    del VIEWS["walking"]


def test_a_docstring_is_read_by_its_sections(walking):
    assert walking.what == "r(t) = t / pace.\n\nA second paragraph."
    assert walking.when == "Take it to go slowly." and walking.synonyms == ("walk",)
    assert walking.source == "Walking, arXiv:2401.00001, and running, arXiv:2401.00002."
    assert walking.papers == ["https://arxiv.org/abs/2401.00001", "https://arxiv.org/abs/2401.00002"]


def test_options_are_fields_with_default_and_meaning(walking):
    assert walking.options == (
        Option("pace", None, "how fast: in positions a token."),
        Option("marks", "list()", "where it stops."),
        Option("unexplained", "None", ""),
    )


@pytest.mark.parametrize("method", [m for m in methods() if m.kind != "objective"], ids=lambda method: method.name)
def test_options_of_a_view_or_a_rescaling_are_those_of_its_constructor(method):
    cls = KINDS[method.kind][method.name]
    read = [
        (o.name, MISSING if o.default is None else eval(o.default, vars(views)))
        for o in method.options
        if "." not in o.name
    ]
    assert read == [(f.name, f.default) for f in fields(cls) if f.init]
    assert method.synonyms == cls.synonyms
