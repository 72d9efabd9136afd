"""The table of docs/serving.md, from what is expected of each cell."""

from collections import Counter

from serving.checkpoints import FAMILIES, RESCALINGS
from serving.expected import cells
from serving.outcomes import WRONG
from serving.programs import PROGRAMS

START, END = "<!-- table: written by docs/serving_table.py -->\n", "<!-- end of the table -->"
RUN_START, RUN_END = "<!-- run: written by docs/serving_table.py -->\n", "<!-- end of the run -->"
WHOLE_START, WHOLE_END = "<!-- whole models: written by docs/serving_table.py -->\n", "<!-- end of whole models -->"


def table() -> str:
    """One row a rescaling, one column a program; mlx-lm has one for each form, which other programs read alike."""
    columns: dict[tuple[str, str], str] = {}
    for name in PROGRAMS:
        if _of(name, "as saved") == _of(name, "older keys"):
            columns[name, "older keys"] = name
        else:
            columns[name, "as saved"] = f"{name}, `rope_parameters` alone"
            columns[name, "older keys"] = f"{name}, older keys too"
    text = f"| rescaling | {' | '.join(columns.values())} |\n|---|{'---|' * len(columns)}\n"
    for rescaling in RESCALINGS:
        kinds = [_cell({of: kind for what, of, kind in _of(*column) if what == rescaling}) for column in columns]
        text += f"| {rescaling} | {' | '.join(kinds)} |\n"
    return text


def _of(program: str, form: str) -> list[tuple[str, str, str]]:
    return [(rescaling, family, kind) for of, rescaling, family, kind in cells(program) if of == form]


def _cell(kinds: dict[str, str]) -> str:
    """The kind of most families, then the others by name."""
    most, *others = [kind for kind, _ in Counter(kinds.values()).most_common()]
    parts = [_bold(most)]
    for kind in others:
        families = [family for family in FAMILIES if kinds.get(family) == kind]
        parts.append(f"{_bold(kind)} for {', '.join(families)}")
    return "; ".join(parts)


def _bold(kind: str) -> str:
    return f"**{kind}**" if kind == WRONG else kind
