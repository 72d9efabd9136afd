"""Padding and documents as kernels read them: what is refused, and what a number that comes again means."""

import pytest
import torch
from support.operators import relations, visible

from rope_kernels import Visibility, relation_kl, relation_kl_ref


def test_borders_may_be_a_list():
    student, teacher = relations(2, 1, 8, 32)
    expected = relation_kl(student, teacher, cu_seqlens=torch.tensor([0, 3, 8, 9, 16]))
    assert torch.equal(relation_kl(student, teacher, cu_seqlens=[0, 3, 8, 9, 16]), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"causal": 1}, "causal must be True or False, got 1"),
        ({"first": None}, "first must be int32 .*, got None"),
        ({"end": 3}, "end must be int32 .*, got 3"),
        ({"first": torch.zeros(1, 8, dtype=torch.int64)}, r"first must be int32 .*, got \[1, 8\] torch.int64"),
        ({"end": torch.zeros(1, 7, dtype=torch.int32)}, r"end must be int32 .*, got \[1, 7\]"),
        ({"end": torch.zeros(1, 8, dtype=torch.int32, device="meta")}, "end must be int32 .* on meta beside .* on cpu"),
    ],
)
def test_parts_that_make_no_visibility_are_refused(change, message):
    parts = dict.fromkeys(("document", "first", "end"), torch.zeros(1, 8, dtype=torch.int32))
    with pytest.raises(ValueError, match=message):
        Visibility(**{"causal": True, **parts, **change})


@pytest.mark.parametrize("document", [torch.zeros(8), torch.zeros(1, 8), torch.zeros(8, dtype=torch.int64), [[0, 0]]])
def test_documents_that_are_no_integers_of_tokens_are_refused(document):
    with pytest.raises(ValueError, match=r"document must be \[batch, n\] integers, -1 on padding.*, got "):
        Visibility.of_documents(document)


def test_a_number_that_comes_again_is_another_document(device):
    """On every path: kernels read where a document begins and ends, chunks read its number."""
    student, teacher = relations(1, 2, 9, 32, device=device)
    numbers = torch.tensor([[-1, 5, 5, -1, 5, 0, 0, 5, 5]], device=device)
    runs = [[-1, 0, 0, -1, 0, 1, 1, 2, 2]]
    seen = visible(9, documents=runs, key_mask=numbers.cpu() >= 0, device=device)
    expected = relation_kl_ref(student.double(), teacher.double(), seen).float()
    actual = relation_kl(student, teacher, visibility=Visibility.of_documents(numbers))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=2e-6)
