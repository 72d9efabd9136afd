"""Views, rescalings and objectives, with the contents of their docstrings."""

import inspect
import re
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from importlib.util import find_spec
from typing import Any, get_args, get_type_hints

_SECTION = re.compile(r"^(Args|When|Source|Returns|Raises|Example): ?", re.MULTILINE)
_OPTION = re.compile(r"^ {4}(\w+): ", re.MULTILINE)
_PAPER = re.compile(r"arXiv:(\d{4}\.\d{4,5})")


@dataclass(frozen=True)
class Option:
    """An option of a method.

    Args:
        name: in a recipe.
        default: as text; None for a required option.
        meaning: from the docstring.
    """

    name: str
    default: str | None
    meaning: str


@dataclass(frozen=True)
class Method:
    """A view, a rescaling or an objective.

    Args:
        kind: "view", "rescaling" or "objective".
        name: in the registry.
        what: the first paragraphs of its docstring, formulas among them.
        when: the sentence that says when to use it; "" if its docstring has none.
        source: paper, equation and section; "" if its docstring has none.
        options: in the order of its fields.
        synonyms: names that others use.
    """

    kind: str
    name: str
    what: str
    when: str
    source: str
    options: tuple[Option, ...]
    synonyms: tuple[str, ...]

    @property
    def papers(self) -> list[str]:
        """Links to the papers of the source."""
        return [f"https://arxiv.org/abs/{number}" for number in dict.fromkeys(_PAPER.findall(self.source))]


def methods() -> list[Method]:
    """All methods by kind and name, of this package and of plugins; objectives only if accelerate is installed."""
    from rope_patch.rescalings import RESCALINGS
    from rope_patch.views import VIEWS

    registries: dict[str, dict[str, Any]] = {"rescaling": RESCALINGS, "view": VIEWS}
    if find_spec("accelerate"):
        from ..objectives import OBJECTIVES

        registries["objective"] = OBJECTIVES
    return [
        _method(kind, name, cls) for kind in sorted(registries) for name, cls in sorted(registries[kind].items())
    ]


def options_of(cls: type, owner: str = "") -> Iterator[Option]:
    """The fields of a dataclass. The options of a field that holds a dataclass follow it, as `field.option`."""
    meanings: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        meanings |= _meanings(_sections(base).get("Args", "")) if "__dataclass_fields__" in vars(base) else {}
    hints = get_type_hints(cls)
    for field in fields(cls):  # type: ignore[arg-type]  # of a class that is a dataclass
        if not field.init:
            continue
        default = None if field.default is MISSING else repr(field.default)
        if field.default_factory is not MISSING:
            default = f"{getattr(field.default_factory, '__name__', 'its default')}()"
        yield Option(owner + field.name, default, meanings.get(field.name, ""))
        inner = [kind for kind in (get_args(hints[field.name]) or (hints[field.name],)) if is_dataclass(kind)]
        for kind in inner[:1]:
            yield from options_of(kind, f"{owner}{field.name}.")  # type: ignore[arg-type]  # no instance


def _method(kind: str, name: str, cls: Any) -> Method:
    parts = _sections(cls)
    return Method(
        kind,
        name,
        parts[""].strip(),
        " ".join(parts.get("When", "").split()),
        " ".join(parts.get("Source", "").split()),
        tuple(options_of(getattr(cls, "options_class", cls))),
        cls.synonyms,
    )


def _sections(cls: type) -> dict[str, str]:
    """Titles and texts of a docstring; what stands before the first title comes under ""."""
    return _pairs(["", *_SECTION.split(inspect.cleandoc(cls.__doc__ or ""))])


def _meanings(text: str) -> dict[str, str]:
    return {name: " ".join(meaning.split()) for name, meaning in _pairs(_OPTION.split(text)[1:]).items()}


def _pairs(parts: list[str]) -> dict[str, str]:
    return dict(zip(parts[::2], parts[1::2], strict=True))
