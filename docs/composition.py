"""Write docs/composition.md from the outcomes of the tests. Run: make docs"""

import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest
import torch
import transformers

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "docs" / "composition.md"
HEAD = """# What composes with what

Model family x attention implementation x batch kind, each cell one test of `tests/rope_patch/test_matrix.py`: a batch
under a skip [view](glossary.md#view), its logits compared with a decoder written from the formulas in float64.
Written by `make docs`, with torch {torch} and transformers {transformers} on {device}; nothing in it is typed by
hand. On a CPU FlashAttention's functions are written out in torch; a dash is a cell that Transformers gets wrong by
itself.

"""


FAMILIES_HEAD = """
## Every family with RoPE

Every causal LM of transformers {transformers} whose code has RoPE, as a tiny random model, each cell one test of
`tests/families/test_every_family.py`: what we do is right, or refused before anything is trained, for the reason
below.

- view: identity bit for bit; a skip leaves the prefix, moves the suffix and hides nothing.
- pi, yarn, abf: saved and loaded with plain Transformers, the rescaled model gives the same logits; unpatched, its old
  ones.
- scaled queries: under `temperature`, the logits of attention whose queries are multiplied by hand.
- native RoPE: `native_rope` gives the old logits while the rescaling stays.
- capture, relations: queries, keys and values of every attention; a step of relation distillation.
- self-distillation: loss of a step against the formula; in one pass also every gradient against two passes.
- checkpointing: gradients under a view with and without it.

"""
COLUMNS = {
    "test_view": "view",
    "test_rescaling-pi": "pi",
    "test_rescaling-yarn": "yarn",
    "test_rescaling-abf": "abf",
    "test_query_scale": "scaled queries",
    "test_native_rope": "native RoPE",
    "test_capture": "capture",
    "test_relation_distillation": "relations",
    "test_self_distillation": "self-distillation",
    "test_checkpointing": "checkpointing",
}


class Outcomes:
    """Pytest plugin that collects the outcome of each cell."""

    def __init__(self) -> None:
        self.cells: dict[tuple[str, str, str], str] = {}
        self.families: dict[str, dict[str, str]] = defaultdict(dict)
        self.notes: dict[str, int] = {}  # reason -> number

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.outcome == "passed":
            return
        test, _, name = report.nodeid.partition("::")[2].partition("[")
        name = name.rstrip("]")
        if "test_every_family" in report.nodeid:
            if name:
                self.add_family(test, name, report)
            return
        # test_cell[family-attention-batch]; families and batches hold dashes, attention names do not
        for attention in ("eager", "sdpa", "flex_attention", "flash_attention_2"):
            family, separator, batch = name.partition(f"-{attention}-")
            if separator:
                self.cells[family, attention, batch] = {"passed": "yes", "failed": "**no**"}.get(report.outcome, "-")

    def add_family(self, test: str, family: str, report: pytest.TestReport) -> None:
        if test == "test_rescaling":
            family, _, method = family.rpartition("-")
            test = f"{test}-{method}"
        if test not in COLUMNS:
            return
        properties = dict(report.user_properties)
        if report.outcome == "failed":
            cell = "**no**"
        elif report.outcome == "skipped":
            cell = f"not run {self.note(str(report.longrepr[2]).removeprefix('Skipped: '))}"
        elif "refused" in properties:
            cell = self.note(properties["refused"])
        elif "two passes" in properties:
            cell = f"two passes {self.note(properties['two passes'])}"
        else:
            cell = "one pass" if test == "test_self_distillation" else "yes"
        self.families[family][COLUMNS[test]] = cell

    def note(self, reason: str) -> str:
        return f"[{self.notes.setdefault(reason, len(self.notes) + 1)}]"

    def family_table(self) -> str:
        """The table, how many cells of each column are right, and the reasons of the rest."""
        columns = list(COLUMNS.values())
        text = f"| family | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}\n"
        for family, cells in sorted(self.families.items()):
            text += f"| {family} | {' | '.join(cells[column] for column in columns)} |\n"
        counts = {column: Counter(_kind(cells[column]) for cells in self.families.values()) for column in columns}
        for kind in ("right", "refused", "wrong", "not run"):
            text += f"| **{kind}** | {' | '.join(str(counts[column][kind]) for column in columns)} |\n"
        whole = sum(all(_kind(cell) == "right" for cell in cells.values()) for cells in self.families.values())
        none = sum(all(_kind(cell) == "refused" for cell in cells.values()) for cells in self.families.values())
        text += (
            f"\nOf {len(self.families)} families {whole} are right in every column and {none} are refused in every "
            f"column.\n\n"
        )
        return text + "".join(f"{number}. {reason}\n" for reason, number in self.notes.items())


def _kind(cell: str) -> str:
    if cell.startswith("["):
        return "refused"
    if cell.startswith("not run"):
        return "not run"
    return "wrong" if cell == "**no**" else "right"


def main() -> int:
    outcomes = Outcomes()
    tests = [str(ROOT / "tests" / name) for name in ("rope_patch/test_matrix.py", "families/test_every_family.py")]
    status = pytest.main(["-q", "-p", "no:xdist", *tests], plugins=[outcomes])
    batches = list(dict.fromkeys(batch for _, _, batch in outcomes.cells))
    rows: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)
    for (family, attention, batch), outcome in outcomes.cells.items():
        rows[family, attention][batch] = outcome
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "a CPU"
    text = HEAD.format(torch=torch.__version__, transformers=transformers.__version__, device=device)
    text += f"| family | attention | {' | '.join(batches)} |\n|---|---|{'---|' * len(batches)}\n"
    for (family, attention), cells in sorted(rows.items()):
        text += f"| {family} | {attention} | {' | '.join(cells[batch] for batch in batches)} |\n"
    text += FAMILIES_HEAD.format(transformers=transformers.__version__) + outcomes.family_table()
    TARGET.write_text(text, encoding="utf-8")
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
