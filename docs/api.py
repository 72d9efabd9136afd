"""Write docs/api.md: every exported name, by the first paragraph of its docstring. Run: make docs"""

import importlib
import inspect
from pathlib import Path
from types import ModuleType
from typing import Any

TARGET = Path(__file__).with_name("api.md")
MODULES = {
    "rope_patch": "patch a loaded model",
    "rope_patch.views": "RoPE indices",
    "rope_patch.rescalings": "RoPE frequencies",
    "rope_patch.losses": "losses of a model under a view or a rescaling",
    "rope_patch.eval": "what a model can do, within its window and beyond",
    "rope_patch.export": "a checkpoint for another program",
    "rope_patch.model_card": "the page beside a checkpoint",
    "trl_ext": "training with TRL",
    "trl_ext.objectives": "what a trainer minimises",
    "trl_ext.rows": "rows to train on",
    "trl_ext.cli": "the command line `rope-patch`",
    "rope_kernels": "operators of losses and attention",
}
HEAD = """# Exported names

Every name that the packages export, with the first paragraph of its docstring. `help(name)` gives the whole: formula,
shapes, units, errors and source. The [glossary](glossary.md) explains the words.
Written by `make docs`; nothing in it is typed by hand.
"""


def described(value: Any) -> str:
    """The first paragraph of a docstring on one line; of a registry, its names."""
    if inspect.isclass(value) or callable(value):
        return " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())
    if isinstance(value, dict):
        return f"By name: {', '.join(f'`{name}`' for name in value)}."
    if isinstance(value, str):
        return "The version of the package." if value[0].isdigit() else f"The text `{value}`."
    return f"A `{type(value).__name__}`."


def rows(module: ModuleType) -> list[str]:
    """A table row of each name that the module exports."""
    descriptions = {name: described(getattr(module, name)).replace("|", "\\|") for name in module.__all__}
    return [f"| `{name}` | {text} |" for name, text in descriptions.items()]


def page() -> str:
    """The whole page."""
    sections = []
    for name, what in MODULES.items():
        table = ["| name | what it is |", "|---|---|", *rows(importlib.import_module(name))]
        sections.append("\n".join([f"\n## {name}: {what}\n", *table]))
    return HEAD + "\n".join(sections) + "\n"


if __name__ == "__main__":
    TARGET.write_text(page(), encoding="utf-8")
