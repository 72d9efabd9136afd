"""What each registered view, rescaling and objective is, read from its class and its docstring."""

import inspect
import re
from collections.abc import Iterable
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from typing import Any, get_args, get_type_hints

_SECTION = re.compile(r"^(Args|When|Source|Returns|Raises|Example): ?", re.MULTILINE)
_PAPER = re.compile(r"arXiv:(\d{4}\.\d{4,5})")


@dataclass(frozen=True)
class Option:
    """An option of a method.

    Args:
        name: as a recipe gives it.
        default: as Python writes it; None for an option that has to be given.
        meaning: of it.
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
        what: its first paragraphs, formulas among them.
        when: a sentence that says when to take it; "" where its class says nothing.
        source: paper, equation and section; "" where its class says nothing.
        options: in the order in which its class has them.
        synonyms: what others call it.
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


def method(kind: str, name: str, cls: type, options: Iterable[Option] | None = None) -> Method:
    """What a registered class says of itself.

    Args:
        kind: of registry.
        name: in it.
        cls: a class whose docstring has sections `Args:`, `When:` and `Source:`.
        options: None takes the fields of `cls`, a dataclass.
    """
    parts = _sections(cls)
    chosen = options_of(cls) if options is None else options
    return Method(
        kind,
        name,
        parts[""],
        _on_one_line(parts.get("When", "")),
        _on_one_line(parts.get("Source", "")),
        tuple(chosen),
        tuple(getattr(cls, "synonyms", ())),
    )


def options_of(cls: type, owner: str = "") -> list[Option]:
    """The fields of a dataclass, with their meanings from its docstring and those of its bases.

    The options of an option that is a dataclass itself follow it, as `option.name`.

    Args:
        cls: the dataclass.
        owner: what the names begin with.
    """
    meanings: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        meanings |= _arguments(inspect.cleandoc(base.__doc__ or ""))
    within, options = option_classes(cls), []
    for f in fields(cls):
        if f.init:
            options.append(Option(owner + f.name, _default(f), meanings.get(f.name, "")))
            options += options_of(within[f.name], f"{owner}{f.name}.") if f.name in within else []
    return options


def option_classes(cls: type) -> dict[str, type]:
    """The fields of a dataclass that hold a dataclass, or None, each with its class."""
    hints = get_type_hints(cls)
    return {
        f.name: kind
        for f in fields(cls)
        for kind in (hints[f.name], *get_args(hints[f.name]))
        if isinstance(kind, type) and is_dataclass(kind)
    }


def _sections(cls: type) -> dict[str, str]:
    """A docstring by its sections; what stands before the first one under ""."""
    lead, *rest = _SECTION.split(inspect.cleandoc(cls.__doc__ or ""))
    return {"": lead.strip(), **dict(zip(rest[::2], rest[1::2], strict=True))}


def _arguments(doc: str) -> dict[str, str]:
    """The meanings in all sections `Args:` of a docstring."""
    meanings: dict[str, list[str]] = {}
    name, within = "", False
    for line in doc.splitlines():
        if line and not line.startswith(" "):
            name, within = "", line == "Args:"
        begins = re.match(r" {4}(\w+): (.*)", line)
        if within and begins:
            name = begins[1]
            meanings[name] = [begins[2]]
        elif name:
            meanings[name].append(line)
    return {name: _on_one_line("\n".join(lines)) for name, lines in meanings.items()}


def _default(field: "Field[Any]") -> str | None:
    if field.default is not MISSING:
        return repr(field.default)
    return None if field.default_factory is MISSING else repr(field.default_factory())


def _on_one_line(text: str) -> str:
    return " ".join(text.split())
