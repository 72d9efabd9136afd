"""`rope-patch methods`: every view, rescaling and objective that is registered, from their classes and docstrings."""

import argparse
import shutil
import textwrap
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rope_patch.catalogue import Method

HEADS = {
    "rescaling": "Rescalings: how the RoPE frequencies are stretched to a longer window (rescale, rescale_args)",
    "view": "Views: the positions at which a training row is read (view, view_args)",
    "objective": "Objectives: what is minimised (objective, objective_args)",
}


def add_commands(commands: Any) -> None:
    """Add `methods` to the subparsers."""
    command = commands.add_parser(
        "methods",
        help="every view, rescaling and objective: when to take it, its options and its paper",
        description="List every view, rescaling and objective with when to take it and its paper. With a NAME, explain "
        "it with its formula and options. Those of installed packages with entry points of rope_patch are among them.",
    )
    command.set_defaults(run=run_methods, output_dir=None)
    command.add_argument("name", nargs="?", metavar="NAME", help="explain this one with its options")


def run_methods(args: argparse.Namespace) -> int:
    """Print the list, or one method."""
    methods = registered()
    if args.name is None:
        print(_listed(methods))
        return 0
    chosen = [method for method in methods if args.name == method.name]
    if not chosen:
        from rope_patch.registry import unknown

        synonyms = {other: method.name for method in methods for other in method.synonyms}
        error = unknown("method", args.name, [method.name for method in methods], synonyms=synonyms)
        if not any(method.kind == "objective" for method in methods):
            raise ValueError(f"{error} Objectives need TRL besides: pip install 'rope-patch[trl]'.")
        raise error
    print("\n\n".join(_explained(method) for method in chosen))
    return 0


def registered() -> "list[Method]":
    """All methods: rescalings, views, objectives, each kind by name. Without TRL there are no objectives."""
    from rope_patch.catalogue import method, options_of
    from rope_patch.rescalings import RESCALINGS
    from rope_patch.views import VIEWS

    methods = [
        method(kind, name, cls)
        for kind, known in (("rescaling", RESCALINGS), ("view", VIEWS))
        for name, cls in sorted(known.items())
    ]
    try:
        import trl  # noqa: F401  # alone, so that nothing else that is missing is hidden
    except ImportError:
        return methods
    from ..objectives import OBJECTIVES

    return [
        *methods,
        *(method("objective", n, cls, options_of(cls.options_class)) for n, cls in sorted(OBJECTIVES.items())),
    ]


def _listed(methods: "list[Method]") -> str:
    width = max(len(method.name) for method in methods) + 4
    parts = []
    for kind, head in HEADS.items():
        own = [method for method in methods if method.kind == kind]
        rows = [_paragraph(f"  {m.name:{width}}", " ".join([m.when, *m.papers]) or "-", width + 2) for m in own]
        if not own:
            rows = ["  none: they need TRL, pip install 'rope-patch[trl]'."]
        parts.append("\n".join([head, "", *rows]))
    return "\n\n".join([*parts, "`rope-patch methods NAME` explains one, with its formula and its options."])


def _explained(method: "Method") -> str:
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
