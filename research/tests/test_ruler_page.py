"""The page and the figure of RULER are what their file holds."""

from support.pages import RESULTS

from result_lines import read_lines
from ruler_results import by_length, by_task, cells_of, of_skills, tasks_of

CELLS = cells_of(read_lines(RESULTS / "ruler-h200.jsonl"))


def test_the_page_has_the_tables_of_the_file():
    page = (RESULTS / "ruler.md").read_text()
    for table in (by_length(CELLS), by_task(CELLS), of_skills(CELLS)):
        assert table in page
    assert len(tasks_of(CELLS)) == 12 and "Mean score of twelve tasks" in page
    assert all(len(scores) == 20 for scores in CELLS.values())
