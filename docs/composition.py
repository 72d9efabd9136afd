"""Write docs/composition.md from the outcomes of the tests. Run: make docs"""

import sys
from collections import defaultdict
from pathlib import Path

import pytest
import torch
import transformers

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "docs" / "composition.md"
HEAD = """# What composes with what

Model family x attention implementation x batch kind, each cell one test of `tests/rope_patch/test_matrix.py`: a batch
under a skip view, its logits compared with a decoder written from the formulas in float64. Written by `make docs`, with
torch {torch} and transformers {transformers} on {device}; nothing in it is typed by hand.

"""


class Outcomes:
    """Pytest plugin that collects the outcome of each cell."""

    def __init__(self) -> None:
        self.cells: dict[tuple[str, str, str], str] = {}

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.outcome == "passed":
            return
        # test_cell[family-attention-batch]; families and batches hold dashes, attention names do not
        name = report.nodeid.partition("[")[2].rstrip("]")
        for attention in ("eager", "sdpa", "flex_attention"):
            family, found, batch = name.partition(f"-{attention}-")
            if found:
                self.cells[family, attention, batch] = {"passed": "yes", "failed": "**no**"}.get(report.outcome, "-")


def main() -> int:
    outcomes = Outcomes()
    status = pytest.main(["-q", "-p", "no:xdist", str(ROOT / "tests/rope_patch/test_matrix.py")], plugins=[outcomes])
    batches = list(dict.fromkeys(batch for _, _, batch in outcomes.cells))
    rows: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)
    for (family, attention, batch), outcome in outcomes.cells.items():
        rows[family, attention][batch] = outcome
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "a CPU"
    text = HEAD.format(torch=torch.__version__, transformers=transformers.__version__, device=device)
    text += f"| family | attention | {' | '.join(batches)} |\n|---|---|{'---|' * len(batches)}\n"
    for (family, attention), cells in sorted(rows.items()):
        text += f"| {family} | {attention} | {' | '.join(cells[batch] for batch in batches)} |\n"
    TARGET.write_text(text, encoding="utf-8")
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
