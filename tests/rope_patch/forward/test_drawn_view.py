"""The RoPE indices of one forward: how often what was drawn for them counts."""

import pytest
import torch

from rope_patch.base.draws import DrawKey
from rope_patch.forward.drawn_view import DrawnView
from rope_patch.layout.documents import Documents, locate_documents
from rope_patch.views import EndPrompt, PerLayer, PosAug, Skip, Uniform


def packed(view):
    """Two rows: documents of 5, 1 and 4 tokens with padding behind them, and documents of 3 and 9 tokens."""
    positions = torch.tensor([[*range(5), 0, *range(4), 0, 0], [*range(3), *range(9)]])
    mask = torch.tensor([[1] * 10 + [0] * 2, [1] * 12])
    documents = locate_documents(2, 12, positions.device, positions, mask)
    return DrawnView(view, documents, view.draw(documents.length, DrawKey(0, 0, documents.ordinal)))


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


def test_a_value_that_documents_share_counts_once():
    drawn = packed(PosAug())
    assert drawn.total("alpha") == (drawn.parameters["alpha"], 1)


def test_all_tokens_count_where_a_view_reads_them():
    drawn = packed(Skip(skip=Uniform(1, 99)))
    drawn.view = EndPrompt(target=99, cue_tokens=[[7, 8]])
    assert drawn.total("skip") == (drawn.parameters["skip"].sum(), 24)


def test_the_total_of_packed_rows_waits_for_no_gpu():
    """On the meta device nothing can be computed whose shape depends on values, for which a GPU is waited for."""
    drawn = packed(Skip(skip=Uniform(1, 99)))
    on_meta = Documents(**{name: x.to("meta") for name, x in vars(drawn.documents).items()})
    meta = DrawnView(drawn.view, on_meta, {name: p.to("meta") for name, p in drawn.parameters.items()})
    total, number = meta.total("skip")
    assert total.shape == number.shape == ()
