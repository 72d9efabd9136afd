"""`rope-patch methods`: every view, rescaling and objective, from their docstrings."""

import argparse
import shutil
import textwrap
from typing import Any

from .catalogue import Method, methods

HEADS = {
    "rescaling": "RoPE scaling: how the RoPE frequencies change for a longer window (rescale, rescale_args)",
    "view": "Views: the position IDs at which training reads a sequence (view, view_args)",
    "objective": "Objectives: the training loss (objective, objective_args), with TRL: pip install 'rope-patch[trl]'",
}


def add_commands(commands: Any) -> None:
    """Add `methods` to the subparsers."""
    command = commands.add_parser(
        "methods",
        help="every view, RoPE scaling and objective: when to use it, its options and its paper",
        description="List every view, RoPE scaling and objective: when to use it, and its paper. With a NAME, explain "
        "one with its formula and options. The list includes those of plugins, installed packages with entry points "
        "of rope_patch.",
    )
    command.set_defaults(run=run_methods, output_dir=None)
    command.add_argument("name", nargs="?", metavar="NAME", help="explain one with its options")


def run_methods(args: argparse.Namespace) -> int:
    """Print the list, or one method."""
    known = methods()
    if args.name is None:
        print(_listed(known))
        return 0
    chosen = [method for method in known if args.name == method.name]
    if not chosen:
        from rope_patch.base.registry import unknown_method

        raise unknown_method("method", args.name, {method.name: method for method in known})
    print("\n\n".join(_explained(method) for method in chosen))
    return 0


def _listed(known: list[Method]) -> str:
    width = max(len(method.name) for method in known) + 4
    parts = []
    for kind, head in HEADS.items():
        own = [method for method in known if method.kind == kind]
        rows = [_paragraph(f"  {m.name:{width}}", " ".join([m.when, *m.papers]) or "-", width + 2) for m in own]
        parts.append("\n".join([head, "", *rows]))
    return "\n\n".join([*parts, "`rope-patch methods NAME` explains one, with its formula and its options."])


def _explained(method: Method) -> str:
    parts = [f"{method.name}, a{'n' if method.kind[0] in 'aeiou' else ''} {method.kind}", method.what]
    parts += [method.when] if method.when else []
    rows = [
        _paragraph(
            "  ",
            f"{o.name} ({'required' if o.default is None else f'default {o.default}'}): {o.meaning or 'not explained'}",
            6,
        )
        for o in method.options
    ]
    parts.append("\n".join(["Options:", *(rows or ["  none"])]))
    if method.source:
        parts.append(_paragraph("", f"Source: {method.source}", 0))
    parts += ["\n".join(method.papers)] if method.papers else []
    return "\n\n".join(parts)


def _paragraph(first: str, text: str, indent: int) -> str:
    return textwrap.fill(
        text,
        width=max(60, min(120, shutil.get_terminal_size((100, 24)).columns)),
        initial_indent=first,
        subsequent_indent=" " * indent,
        break_on_hyphens=False,
        break_long_words=False,
    )
