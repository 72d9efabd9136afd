"""Run every program on every tiny checkpoint and write the table of docs/serving.md. Run: python docs/serving_table.py

The programs come first: python tests/serving/programs.py. It takes about half an hour on two cores. With --no-run
it writes the table from tests/serving/expected.py as it is. Tables of research/results/serving.md are always written.
"""

import argparse
import sys
import tempfile
from datetime import date
from pathlib import Path

import transformers

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "research" / "experiments")]
sys.path.append(str(ROOT / "tests"))  # last: its folders bear our packages' names

from serving.checkpoints import FAMILIES  # noqa: E402
from serving.expected import expected_of  # noqa: E402
from serving.outcomes import RIGHT, WRONG, Outcome, outcomes_of  # noqa: E402
from serving.programs import PROGRAMS  # noqa: E402
from serving.table import END, RUN_END, RUN_START, START, WHOLE_END, WHOLE_START, table  # noqa: E402

from result_lines import read_lines  # noqa: E402
from served_results import tables  # noqa: E402

PAGE = ROOT / "docs" / "serving.md"
RESULTS = ROOT / "research" / "results"


def main() -> int:
    """Write the tables; that of tiny models only if every outcome is as tests/serving/expected.py has it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-run", action="store_true", help="write the tables from what is expected and stored")
    args = parser.parse_args()
    _write(RESULTS / "serving.md", WHOLE_START, WHOLE_END, tables(read_lines(RESULTS / "served-cpu.jsonl")))
    if args.no_run:
        _write(PAGE, START, END, table())
        return 0
    return _run()


def _run() -> int:
    if missing := [program.missing for program in PROGRAMS.values() if program.missing]:
        print(*missing, sep="\n")
        return 1
    changed, differences = 0, {RIGHT: [], WRONG: []}
    for program in PROGRAMS.values():
        for family in FAMILIES:
            with tempfile.TemporaryDirectory() as folder:
                outcomes = outcomes_of(program, family, Path(folder))
            print(f"{program.name}, {family}: {len(outcomes)} cells", flush=True)
            changed += _tell_changes(program.name, family, outcomes)
            for outcome in outcomes.values():
                if outcome.kind in differences and outcome.differences:
                    differences[outcome.kind].append(max(outcome.differences.values()))
    if changed:
        print(f"{changed} cells are not as tests/serving/expected.py has them; the page stays as it is.")
        return 1
    versions = ", ".join(f"{program.package} {program.version}" for program in PROGRAMS.values())
    run = (
        f"Run on {date.today()} beside Transformers {transformers.__version__}, on CPUs, with the packages {versions}. "
        f"Right logits differ by {max(differences[RIGHT]):.2g} at most, wrong ones by {min(differences[WRONG]):.2g} to "
        f"{max(differences[WRONG]):.2g}.\n"
    )
    _write(PAGE, START, END, table())
    _write(PAGE, RUN_START, RUN_END, run)
    return 0


def _tell_changes(program: str, family: str, outcomes: dict[tuple[str, str], Outcome]) -> int:
    expected = expected_of(program, family)
    changed = {cell: outcome for cell, outcome in outcomes.items() if outcome.kind != expected[cell]}
    for cell, outcome in changed.items():
        print(f"{program}, {family}, {cell}: expected {expected[cell]}, got {outcome}")
    return len(changed)


def _write(page: Path, start: str, end: str, text: str) -> None:
    before, _, rest = page.read_text(encoding="utf-8").partition(start)
    page.write_text(before + start + text + end + rest.partition(end)[2], encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
