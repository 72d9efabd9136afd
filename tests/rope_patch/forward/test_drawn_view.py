"""The RoPE indices of one forward: how often what was drawn for them counts."""

import pytest
import torch

from rope_patch.base.draws import DrawKey
from rope_patch.forward.drawn_view import DrawnView
from rope_patch.layout.documents import Documents, locate_documents
from rope_patch.views import LongRecipe, PerLayer, PosAug, Skip, Uniform


def packed(view, draw=True):
    """Two rows: documents of 5, 1 and 4 tokens with padding behind them, and documents of 3 and 9 tokens."""
    positions = torch.tensor([[*range(5), 0, *range(4), 0, 0], [*range(3), *range(9)]])
    mask = torch.tensor([[1] * 10 + [0] * 2, [1] * 12])
    documents = locate_documents(2, 12, positions.device, positions, mask)
    t = (positions - documents.start).masked_fill(mask == 0, -1)
    drawn = view.draw(documents.length, DrawKey(0, 0, documents.ordinal)) if draw else {}
    return DrawnView(view, documents, drawn, t=t)


@pytest.mark.parametrize(
    "view",
    [Skip(skip=Uniform(1, 99)), PosAug(granularity="sample"), PerLayer(Skip(skip=Uniform(1, 99)))],
    ids=["integers", "fractions", "layers"],
)
def test_a_document_of_a_packed_row_counts_once(view):
    drawn = packed(view)
    for name, values in drawn.parameters.items():
        first_tokens = values[..., [0, 0, 0, 1, 1], [0, 5, 6, 0, 3]].double()
        total, number = drawn.total(name)
        assert total.dtype == torch.float64 and number == first_tokens.numel()
        # float64 has integers exactly; fractions may be added in another order
        assert total == first_tokens.sum() if values.dtype == torch.int64 else abs(total - first_tokens.sum()) < 1e-12


def test_a_value_that_documents_share_counts_for_each_of_them():
    drawn = packed(PosAug())
    total, number = drawn.total("alpha")
    assert number == 5 and abs(total - 5 * drawn.parameters["alpha"]) < 1e-12


@pytest.mark.parametrize("side", ["packed", "right", "left"])
def test_a_document_counts_with_the_mean_of_its_tokens_where_a_view_reads_them(side):
    drawn = packed(LongRecipe(target=99, sentence_ends=[7]), draw=False)
    rows, (one, two) = [range(5), range(5, 6), range(6, 10)], (range(3), range(3, 12))
    places = [(0, tokens) for tokens in rows] + [(1, one), (1, two)]
    if side != "packed":
        mask = torch.tensor([[1] * 7 + [0] * 5, [1] * 12])
        mask = mask if side == "right" else mask.flip(1)
        drawn.documents = locate_documents(2, 12, mask.device, None, mask)
        drawn.t = (torch.arange(12)[None] - drawn.documents.start).masked_fill(mask == 0, -1)
        places = [(0, range(7) if side == "right" else range(5, 12)), (1, range(12))]
    offset = torch.arange(24).view(2, 12) ** 2
    drawn.parameters = {"offset": offset}
    total, number = drawn.total("offset")
    means = [sum(int(offset[row, i]) for i in tokens) / len(tokens) for row, tokens in places]
    assert number == len(places) and total == pytest.approx(sum(means), rel=1e-12)


@pytest.mark.parametrize("view", [Skip(skip=Uniform(1, 99)), Skip([[1]], Uniform(1, 99))], ids=["draws", "reads"])
def test_the_total_of_packed_rows_waits_for_no_gpu(view):
    """On the meta device nothing can be computed whose shape depends on values, for which a GPU is waited for."""
    drawn = packed(Skip(skip=Uniform(1, 99)))
    drawn.view = view
    on_meta = Documents(**{name: x.to("meta") for name, x in vars(drawn.documents).items()})
    on_meta_too = {name: p.to("meta") for name, p in drawn.parameters.items()}
    meta = DrawnView(drawn.view, on_meta, on_meta_too, t=drawn.t.to("meta"))
    total, number = meta.total("skip")
    assert total.shape == number.shape == ()
