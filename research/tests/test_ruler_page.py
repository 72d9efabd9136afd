"""The page and the figure of RULER are what their file holds."""

import re

from support.pages import RESULTS

from ruler_results import beside, by_length, by_task, lengths_of, load, scores

RUNS = load()


def test_the_page_has_the_tables_of_the_file():
    page = (RESULTS / "ruler.md").read_text()
    for table in (by_length(RUNS), beside(RUNS), by_task(RUNS)):
        assert table in page
    for same in RUNS.values():
        assert all(len(scores(run, n)) == 13 * 20 for run in same for n in lengths_of(RUNS))
    assert {len(RUNS[arm]) for arm in RUNS if arm.startswith(("skills", "keep"))} == {3}


def test_within_its_window_the_extended_model_loses_nothing():
    for table in (by_length(RUNS), by_task(RUNS)):
        rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
        column = next((k for k, head in enumerate(rows[0]) if head.startswith("extended by rope-patch")), None)
        cells = (
            next(r for r in rows if r[0] == "extended by rope-patch")
            if column is None
            else [r[column] for r in rows[2:]]
        )
        assert len(cells) > 10 and not any(re.search(r"\d\*", cell) for cell in cells)
