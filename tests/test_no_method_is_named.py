"""The trainer and its parts ask views and rescalings, and name none, so that those of plugins get the same."""

import ast
import re
from pathlib import Path

import pytest

from rope_patch.rescalings import RESCALINGS
from rope_patch.views import VIEWS

ROOT = Path(__file__).parents[1]
QUOTED = re.compile(r"(?:view|rescale)=?['\" ]+([a-z0-9-]+)['\"]")  # in a message
NAMES = {*VIEWS, *RESCALINGS}
CLASSES = {cls.__name__ for registry in (VIEWS, RESCALINGS) for cls in registry.values()}

# what is about a method by its nature, or about a thing of the same name
SUBJECTS = {
    "trl_ext/extension/choices.py": "chooses the methods that were measured to lose least",
    "rope_patch/eval/measures/probe.py": "measures what YaRN does untrained, and advises a skip view after it",
    "rope_patch/eval/measures/view_kl.py": "measures a KL by the length of a skip",
}
ALLOWED = {  # (start of a path, name) -> what else it is
    ("rope_patch/", "temperature"): "of sampling, or of a softmax",
    ("trl_ext/", "temperature"): "of sampling, or of a softmax",
    ("trl_ext/rows/__init__.py", "mix"): "a module",
    ("trl_ext/objectives/", "standard"): "true positions",
    ("rope_patch/rope/rotary.py", "longrope"): "a RoPE type of Transformers",
    ("rope_patch/rope/rotary.py", "yarn"): "a RoPE type of Transformers",
}
CORE = "patch methods describe loading rescalings/in_place rope/rotary".split()


def modules():
    """Of the trainer, the evaluation and the core, relative to the root."""
    folders = (
        "trl_ext",
        *(f"rope_patch/{room}" for room in "adapters attention eval forward generation layout prompts".split()),
    )
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    files += [ROOT / "rope_patch" / f"{name}.py" for name in CORE]
    names = [file.relative_to(ROOT).as_posix() for file in files]
    return sorted(name for name in names if not name.startswith(tuple(SUBJECTS)))


def named_in(code):
    """Views and rescalings that code names, as classes or by strings that are compared, looked up or given."""
    tree = ast.parse(code)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute):
            names |= {node.id if isinstance(node, ast.Name) else node.attr} & CLASSES
        elif isinstance(node, ast.alias):
            names |= {node.name} & CLASSES
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            names |= {node.value, *QUOTED.findall(node.value)} & NAMES
    return names


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("if view == 'pose': pass", {"pose"}),
        ("isinstance(view, views.PoSE)", {"PoSE"}),
        ("from rope_patch.views import Skip as S", {"Skip"}),
        ("TABLE = {'endprompt': 1, 'pi': 2}", {"endprompt", "pi"}),
        ("raise ValueError(\"take view='skip'\")", {"skip"}),
        ("raise ValueError(f\"view 'pose' of {n}\")", {"pose"}),
        ("def f():\n    \"\"\"As view 'pose' does.\"\"\"", set()),
        ("kind = view.name", set()),
    ],
)  # fmt: skip
def test_names_are_found(code, names):
    assert named_in(code) == names


def test_no_module_names_a_view_or_a_rescaling():
    files = modules()
    assert {f"trl_ext/{n}.py" for n in ("config", "trainer/trainer", "trainer/window_check", "cli/console")} <= {*files}
    assert all((ROOT / name).exists() for name in SUBJECTS)
    for file in files:
        allowed = {name for path, name in ALLOWED if file.startswith(path)}
        names = named_in((ROOT / file).read_text()) - allowed
        assert not names, (
            f"{file} names {names}: ask a method of View or Rescaling, which those of plugins have too; if it is "
            "another thing of that name, say in ALLOWED what"
        )
