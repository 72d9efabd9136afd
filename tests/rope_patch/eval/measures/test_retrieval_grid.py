"""Results of a grid: by wording, as written and teacher-forced."""

from dataclasses import replace

import pytest
import torch
from support.characters import CHARACTERS
from support.retrieval import TOKENIZER, lookup
from support.tiny import tiny

from rope_patch.eval import RetrievalGrid, passkey
from rope_patch.eval.measures import prompt_grid
from rope_patch.eval.measures.prompt_grid import ALL_WORDINGS, PromptGrid


def test_a_model_that_understands_one_wording_only_shows_so():
    grid = passkey(
        lookup(lambda text, values: values if "pass key" in text else []),
        TOKENIZER,
        [600],
        depths=(0.2, 0.5),
        trials=4,
        progress=False,
    )
    assert grid.by_wording(600) == {0: 1.0, 1: 0.0, 2: 0.0, 3: 0.0} and grid.by_length == [0.25]
    assert "25 % at 600 tokens (0 to 100 by wording)" in grid.reading()[0]
    rows = [row for row in grid.table() if row["wording"] == 0]
    assert [(row["depth"], row["as_written"], row["prompts"]) for row in rows] == [("all", 1.0, 2)]
    assert [r["score"] for r in grid.replies] == [1, 0, 0, 0]
    assert grid.replies[0]["expected"] in grid.replies[0]["reply"] and not grid.replies[1]["reply"].strip()
    held_out = passkey(lookup(), TOKENIZER, [600], depths=(0.5,), trials=4, wordings=(1, 3), progress=False)
    assert held_out.wordings == [1, 3, 1, 3] and held_out.by_length == [1]


@pytest.mark.parametrize("by_its_own", [False, True], ids=["in rows", "by generate"])
def test_both_measures_come_from_one_grid_and_are_named_apart(by_its_own):
    """A model that would write something else, and says each digit where the right ones stand before it."""
    model = tiny(vocab_size=CHARACTERS, attention="eager" if by_its_own else "sdpa")
    grid = passkey(model, TOKENIZER, [600], depths=(0.2, 0.7), trials=2, progress=False)
    prompts = PromptGrid("passkey", TOKENIZER, [600], (0.2, 0.7), 2, 1, 0, "auto", ALL_WORDINGS)
    expected = []
    with torch.no_grad():
        for p in prompts.prompts(600, prompt_grid.passkey_haystacks(TOKENIZER, [600])):
            logits = model(torch.tensor([[*p.ids, *p.right_reply]])).logits[0]
            expected.append(p.forced_score(logits[len(p.ids) - 1 : -1].argmax(-1).tolist()))
    assert grid.forced_scores == expected and grid.forced_by_length == [sum(expected) / 4]
    knows = replace(grid, scores=[0.0] * 4, accuracy=[[0.0, 0.0]], forced_scores=[1.0, 1.0, 1.0, 0.0])
    assert knows.headline() == {"passkey at 600, as written": 0, "passkey at 600, with the answer given": 0.75}
    assert [(r["as_written"], r["teacher_forced"]) for r in knows.table()][:2] == [(0, 1), (0, 0.5)]
    said = knows.reading()
    assert (
        said[0].startswith("model, as written: 0 % at 600")
        and said[1] == "model, with the answer given: 75 % at 600 tokens."
    )
    assert RetrievalGrid.column == "as_written", "models are compared by it"


def test_the_shades_of_a_figure_are_in_percent_as_its_numbers_are():
    grid = passkey(lookup(), TOKENIZER, [600], depths=(0.5,), trials=1, progress=False)
    figure = RetrievalGrid.figure({"one": grid})
    figure.canvas.draw()
    shown = [label.get_text() for label in figure.axes[-1].get_yticklabels()]
    assert (shown[0], shown[-1]) == ("0", "100")
