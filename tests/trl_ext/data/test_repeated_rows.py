"""What is left of the last batches of an evaluation on several ranks, where accelerate has repeated rows."""

from types import SimpleNamespace

import pytest
import torch

from trl_ext.data.repeated_rows import without_repeated

SIZE = 3


def batch(rows=SIZE):
    ids = torch.arange(rows * 4).view(rows, 4)
    return {"input_ids": ids, "labels": ids.clone(), "num_items": torch.tensor(7), "names": ["a"] * rows}


def last(remainder, end=True):
    return SimpleNamespace(end_of_dataloader=end, remainder=remainder)


@pytest.mark.parametrize(("reader", "kept"), [(0, 3), (1, 2), (2, 0)])
def test_five_rows_of_nine_places(reader, kept):
    inputs, only_repeated = without_repeated(batch(), last(5), SIZE, reader)
    assert only_repeated is (kept == 0)
    assert inputs["names"] == ["a"] * SIZE and inputs["num_items"] == 7
    if kept:
        assert inputs["input_ids"].tolist() == batch()["input_ids"][:kept].tolist()
        assert inputs["labels"].tolist() == inputs["input_ids"].tolist()
    else:  # it runs, as the other ranks do, and has nothing to learn from
        assert len(inputs["input_ids"]) == SIZE and (inputs["labels"] == -100).all()


@pytest.mark.parametrize(
    ("state", "rows"),
    [(last(5, end=False), SIZE), (last(0), SIZE), (last(-1), SIZE), (last(2), 2)],
    ids=["not the last", "full", "unknown", "not filled up"],
)
def test_a_batch_without_repeated_rows_stays(state, rows):
    given = batch(rows)
    inputs, only_repeated = without_repeated(given, state, SIZE, 1)
    assert inputs is given and not only_repeated
