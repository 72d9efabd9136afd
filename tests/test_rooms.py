"""Rooms of the packages: imports between them go one way, none is crowded, and each describes its content."""

import ast
import functools
from collections import Counter
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "rope_kernels": ROOT / "kernels" / "rope_kernels",
    "rope_patch": ROOT / "rope_patch",
    "trl_ext": ROOT / "trl_ext",
}


@functools.cache
def modules():
    """Name -> file of each module; a package goes by its `__init__.py`."""
    names = {}
    for package, folder in PACKAGES.items():
        for file in folder.rglob("*.py"):
            parts = [package, *file.relative_to(folder).with_suffix("").parts]
            names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return names


def imported(name, code, known, is_package=False):
    """The modules among `known` that code of module `name` imports when it runs, in functions too.

    Imports for type checkers alone never run. A package is imported with each of its modules, which is no circle as
    long as they take nothing from it, so it counts only where it is named.
    """
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = []
    parts = name.split(".") if is_package else name.split(".")[:-1]
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = parts[: len(parts) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            # `from package import module` names the module, `from package import name` the package
            names |= {f"{module}.{a.name}" if f"{module}.{a.name}" in known else module for a in node.names}
    return names & known.keys() - {name}


def circle(graph):
    """A circle of imports, each module importing the next, or None."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1][::-1]
    return None


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("from .b import x", {"p.b"}),
        ("from . import b", {"p.b"}),
        ("from .. import p", set()),
        ("import q.c", {"q.c"}),
        ("def f():\n    from q import c", {"q.c"}),
        ("from q import name", {"q"}),
        ("if TYPE_CHECKING:\n    from .b import X", set()),
    ],
)
def test_imports_are_read(code, names):
    known = dict.fromkeys(["p", "p.a", "p.b", "q", "q.c"])
    assert imported("p.a", code, known) == names


def test_a_circle_is_named():
    assert set(circle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}})) == {"a", "b", "c"}
    assert circle({"a": {"b", "c"}, "b": {"c"}}) is None


@functools.cache
def imports():
    """Name -> names of the modules that it imports."""
    known = modules()
    return {name: imported(name, file.read_text(), known, file.name == "__init__.py") for name, file in known.items()}


def room(name):
    """The room of a module: the package that it lies in; a module outside of all is its own room."""
    parent = name.rpartition(".")[0]
    return name if modules()[name].name == "__init__.py" or parent in PACKAGES else parent


def test_no_module_imports_itself_by_way_of_others():
    around = circle(imports())
    assert around is None, (
        f"{' imports '.join(around)}: move what both need into a module of its own; an import in a function only hides "
        "the circle"
    )


def test_imports_between_rooms_go_one_way():
    graph = {}
    for name, others in imports().items():
        if name not in PACKAGES:  # what a package exports comes from its rooms
            graph.setdefault(room(name), set()).update(room(other) for other in others - PACKAGES.keys())
    around = circle({name: others - {name} for name, others in graph.items()})
    assert around is None, f"{' imports '.join(around)}: which of them is the lower one?"


def test_rope_patch_takes_torch_and_transformers_alone():
    """Other packages are imported where they are used."""
    others = {"datasets", "lm_eval", "matplotlib", "peft", "triton", "trl", "trl_ext"}
    for name, file in modules().items():
        if name.startswith("rope_patch"):
            for node in ast.parse(file.read_text()).body:
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
                assert not {module.partition(".")[0] for module in names} & others, name


def test_no_room_is_crowded():
    sizes = Counter(room(name) for name in modules())
    assert {name: size for name, size in sizes.items() if size > 25} == {}


def test_a_room_says_what_lives_there():
    silent = []
    for name, file in modules().items():
        if file.name == "__init__.py" and name.count(".") >= 1 and not name.startswith("rope_kernels"):
            lines = (ast.get_docstring(ast.parse(file.read_text())) or "").splitlines()
            silent += [name] * (len([line for line in lines if line]) < 2)
    assert silent == []
