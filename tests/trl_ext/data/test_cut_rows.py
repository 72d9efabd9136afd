"""Rows are cut to what a view reads."""

import torch

from rope_patch.base.draws import DrawKey
from rope_patch.views import PoSE
from trl_ext.data.cut_rows import cut_rows


def test_rows_are_cut_wherever_their_padding_is():
    view, key = PoSE(target=64, window=6), DrawKey(0, torch.tensor(0), torch.arange(3)[:, None])
    lengths, ids_by_side = (17, 9, 4), {}
    for side in ("right", "left"):
        ids = torch.zeros(3, 17, dtype=torch.int64)
        for row, n in enumerate(lengths):
            begin = 0 if side == "right" else 17 - n
            ids[row, begin : begin + n] = torch.arange(1, n + 1) + 100 * row
        batch = {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": ids.masked_fill(ids == 0, -100)}
        assert cut_rows(view, batch, key)
        assert batch["attention_mask"].sum(1).tolist() == [6, 6, 4]
        assert torch.equal(batch["labels"], batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100))
        ids_by_side[side] = batch["input_ids"]
    assert torch.equal(ids_by_side["right"], ids_by_side["left"])
    assert ids_by_side["right"][2].tolist() == [201, 202, 203, 204, 0, 0]
    assert not cut_rows(view, {"input_ids": torch.ones(3, 6, dtype=torch.int64)}, key)
