"""`rope-patch new`: a package of your own with a view, a rescaling, an objective or a measure."""

import argparse
import re
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import Any

KINDS = {"view": "rope-patch", "rescaling": "rope-patch", "objective": "rope-patch[trl]", "measure": "rope-patch[eval]"}
"""What the command makes -> what the package requires."""

_TEMPLATES = Path(__file__).with_name("templates")


def add_commands(commands: Any) -> None:
    """Add `new` to the subparsers."""
    command = commands.add_parser(
        "new",
        help="a view, RoPE scaling, objective or measure of your own, as a package with tests",
        description="Write a package with a view, a rescaling (RoPE scaling), an objective or a measure to change into "
        "yours: a module with an example, its tests, and a pyproject.toml whose entry point lets scripts, recipes and "
        "commands find it by NAME once it is installed.",
    )
    command.set_defaults(run=run_new, output_dir=None)
    command.add_argument("kind", choices=KINDS, metavar="KIND", help=", ".join(KINDS))
    command.add_argument("name", metavar="NAME", help="lower-case words with hyphens between them, such as far-half")
    command.add_argument("--output", type=Path, metavar="FOLDER", help="folder to write; default: NAME")


def run_new(args: argparse.Namespace) -> int:
    """Write the package, and print what to do next."""
    folder = args.output or Path(args.name)
    write_package(args.kind, args.name, folder)
    print(f"{folder} has {args.name!r} and its tests. Next: pip install -e {folder} && pytest {folder}")
    return 0


def write_package(kind: str, name: str, folder: Path) -> None:
    """Write pyproject.toml, the module and its tests into `folder`.

    Raises:
        ValueError: the name is not one, or another method or module has it; or the folder is not empty.
    """
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name):
        raise ValueError(f"NAME must be lower-case words with hyphens between them, such as far-half, got {name!r}.")
    module = name.replace("-", "_")
    if find_spec(module) is not None or _is_method(name):
        raise ValueError(f"NAME {name!r} is taken by a method of rope-patch or by an installed module: choose another.")
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"--output {folder} is not empty: choose another folder.")
    values = {
        "name": name,
        "module": module,
        "cls": "".join(word.capitalize() for word in name.split("-")),
        "group": f"rope_patch.{kind}s",
        "requirement": KINDS[kind],
    }
    folder.mkdir(parents=True, exist_ok=True)
    for file, template in (
        ("pyproject.toml", "pyproject"),
        (f"{module}.py", kind),
        (f"test_{module}.py", f"{kind}_test"),
    ):
        text = (_TEMPLATES / f"{template}.txt").read_text("utf-8")
        (folder / file).write_text(Template(text).substitute(values), "utf-8")


def _is_method(name: str) -> bool:
    from .catalogue import methods

    return any(method.name == name for method in methods())
