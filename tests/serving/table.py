"""The table of docs/serving.md, from what is expected of each cell."""

from serving.checkpoints import FAMILIES, RESCALINGS
from serving.expected import cells
from serving.outcomes import RIGHT, WRONG
from serving.programs import PROGRAMS

START, END = "<!-- table: written by docs/serving.py -->\n", "<!-- end of the table -->"
RUN_START, RUN_END = "<!-- run: written by docs/serving.py -->\n", "<!-- end of the run -->"


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
    """Families by kind, the kind alone where all that take the rescaling have it."""
    groups: dict[str, list[str]] = {}
    for family in FAMILIES:
        if family in kinds:
            groups.setdefault(kinds[family], []).append(family)
    if len(groups) == 1:
        return _bold(next(iter(groups)))
    return "; ".join(f"{_bold(kind)}: {', '.join(families)}" for kind, families in groups.items())


def _bold(kind: str) -> str:
    return {RIGHT: RIGHT, WRONG: f"**{WRONG}**"}.get(kind, kind)
