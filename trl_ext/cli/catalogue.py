"""Views, rescalings and objectives, read from their source files: importing them would take torch, and seconds."""

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from operator import itemgetter
from pathlib import Path
from typing import TypeGuard

KINDS = {"VIEWS": "view", "RESCALINGS": "rescaling", "OBJECTIVES": "objective"}
"""Registry -> kind of method."""

_REGISTERED = re.compile(rf"^@({'|'.join(KINDS)})\.register\(", re.MULTILINE)
_SECTION = re.compile(r"^(Args|When|Source|Returns|Raises|Example): ?", re.MULTILINE)
_OPTION = re.compile(r"^ {4}(\w+): ", re.MULTILINE)
_PAPER = re.compile(r"arXiv:(\d{4}\.\d{4,5})")


@dataclass(frozen=True)
class Option:
    """An option of a method.

    Args:
        name: in a recipe.
        default: as its class writes it; None for a required option.
        meaning: from the docstring.
    """

    name: str
    default: str | None
    meaning: str


@dataclass(frozen=True)
class Method:
    """A view, a rescaling or an objective.

    Args:
        kind: a value of `KINDS`.
        name: in the registry.
        what: the first paragraphs of its docstring, formulas among them.
        when: the sentence that says when to use it; "" if its docstring has none.
        source: paper, equation and section; "" if its docstring has none.
        options: in the order of its docstring.
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
    """All methods by kind and name: those of this package, and those that plugins have registered or declare."""
    ours = {
        (KINDS[registry], name): (
            node,
            _class(_called(options)) if (options := _attribute(node, "options_class")) else node,
        )
        for text in _files()
        if _REGISTERED.search(text)
        for node in _classes(text).values()
        for registry, name in _registered_as(node)
    }
    plugins = {
        (kind, name): (_node_of(cls), _node_of(getattr(cls, "options_class", cls)))
        for kind, name, cls in _registered()
        if (kind, name) not in ours
    }
    known = sorted({**ours, **plugins}.items(), key=itemgetter(0))
    return [_method(kind, name, *nodes) for (kind, name), nodes in known]


def options_of(cls: type) -> list[Option]:
    """The fields of a dataclass, with their meanings from its docstring."""
    return list(_options(_node_of(cls)))


def _registered() -> Iterator[tuple[str, str, type]]:
    """Registered classes: none until the registries are imported, which takes an entry point of a plugin."""
    groups = entry_points().groups
    if "rope_patch" in sys.modules or {"rope_patch.views", "rope_patch.rescalings"} & groups:
        from rope_patch.rescalings import RESCALINGS
        from rope_patch.views import VIEWS

        for registry in (VIEWS, RESCALINGS):
            registry.load_all()
            yield from ((registry.kind, *item) for item in registry.items())
    if "trl_ext.objectives" in sys.modules or "rope_patch.objectives" in groups:
        from ..objectives import OBJECTIVES

        OBJECTIVES.load_all()
        yield from ((OBJECTIVES.kind, *item) for item in OBJECTIVES.items())


def _registered_as(node: ast.ClassDef) -> list[tuple[str, str]]:
    """Registry and name of each `@REGISTRY.register("name")` over a class."""
    calls = [call for call in node.decorator_list if isinstance(call, ast.Call)]
    at = [(_called(call).partition(".register")[0], call.args[0]) for call in calls if call.args]
    return [(registry, ast.literal_eval(name)) for registry, name in at if registry in KINDS]


def _method(kind: str, name: str, node: ast.ClassDef, options: ast.ClassDef) -> Method:
    """A method from its class and the class of its options."""
    parts = dict(_sections(node))
    synonyms = _attribute(node, "synonyms")
    return Method(
        kind,
        name,
        parts[""].strip(),
        " ".join(parts.get("When", "").split()),
        " ".join(parts.get("Source", "").split()),
        tuple(_options(options)),
        ast.literal_eval(synonyms) if synonyms else (),
    )


def _options(node: ast.ClassDef, owner: str = "") -> Iterator[Option]:
    """The fields of a dataclass. The options of a field that holds a dataclass follow it, as `field.option`."""
    fields: dict[str, ast.AnnAssign] = {}
    meanings: dict[str, str] = {}
    for cls in reversed(_lineage(node)):  # bases first, whose fields a class may explain anew
        if "dataclass" in map(_called, cls.decorator_list):
            fields |= {ast.unparse(line.target): line for line in cls.body if _is_field(line)}
            for title, text in _sections(cls):
                meanings |= _meanings(text) if title == "Args" else {}
    for name, line in fields.items():
        yield Option(owner + name, _default(line.value), meanings.get(name, ""))
        yield from (option for cls in _within(line.annotation) for option in _options(cls, f"{owner}{name}."))


def _lineage(node: ast.ClassDef) -> list[ast.ClassDef]:
    """A class and its bases, as far as they are ours."""
    bases = [_class(base.id) for base in node.bases if isinstance(base, ast.Name) and _file_of(base.id)]
    return [node, *(cls for base in bases for cls in _lineage(base))]


def _is_field(line: ast.stmt) -> TypeGuard[ast.AnnAssign]:
    """Whether a line of a dataclass's body is a field that its constructor takes."""
    return (
        isinstance(line, ast.AnnAssign)
        and "ClassVar" not in ast.unparse(line.annotation)
        and not (isinstance(line.value, ast.Call) and "init=False" in ast.unparse(line.value))
    )


def _within(annotation: ast.expr) -> list[ast.ClassDef]:
    """Our dataclass that a field holds, if it holds one."""
    names = [node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)]
    classes = [_class(name) for name in names if _file_of(name)]
    return [cls for cls in classes if "dataclass" in map(_called, cls.decorator_list)][:1]


def _default(value: ast.expr | None) -> str | None:
    if isinstance(value, ast.Call) and _called(value) == "field":  # dataclasses.field(default=...)
        given = {keyword.arg: keyword.value for keyword in value.keywords}
        if "default_factory" in given:
            factory = given["default_factory"]
            return ast.unparse(factory.body) if isinstance(factory, ast.Lambda) else f"{ast.unparse(factory)}()"
        value = given.get("default")
    return None if value is None else ast.unparse(value)


def _attribute(node: ast.ClassDef, name: str) -> ast.expr | None:
    """The value that a class, or the nearest of its bases, assigns to `name`; None if none does."""
    for line in (line for cls in _lineage(node) for line in cls.body):
        targets = line.targets if isinstance(line, ast.Assign) else [getattr(line, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return line.value  # type: ignore[attr-defined]
    return None


def _called(expression: ast.expr | None) -> str:
    """The name of a function or class, also where it is called with arguments."""
    return (
        "" if expression is None else ast.unparse(expression.func if isinstance(expression, ast.Call) else expression)
    )


def _sections(node: ast.ClassDef) -> list[tuple[str, str]]:
    """Titles and texts of a docstring; what stands before the first title comes under ""."""
    # a pattern with a group keeps what it matched: text, title, text, title, text
    return _pairs(["", *_SECTION.split(ast.get_docstring(node) or "")])


def _meanings(text: str) -> dict[str, str]:
    return {name: " ".join(meaning.split()) for name, meaning in _pairs(_OPTION.split(text)[1:])}


def _pairs(parts: list[str]) -> list[tuple[str, str]]:
    return list(zip(parts[::2], parts[1::2], strict=True))


def _node_of(cls: type) -> ast.ClassDef:
    # of a plugin, whose file need not be one of ours
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(node, ast.ClassDef)
    return node


def _class(name: str) -> ast.ClassDef:
    text = _file_of(name)
    assert text is not None, name
    return _classes(text)[name]


@cache
def _file_of(name: str) -> str | None:
    """The text of our file that defines the class `name`."""
    return next((text for text in _files() if re.search(rf"^class {name}\b", text, re.MULTILINE)), None)


@cache
def _classes(text: str) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)}


@cache
def _files() -> list[str]:
    spec = find_spec("rope_patch")  # which finds a package without importing it
    assert spec is not None and spec.origin is not None
    folders = Path(spec.origin).parent, Path(__file__).parents[1]
    return [path.read_text("utf-8") for folder in folders for path in sorted(folder.rglob("*.py"))]
