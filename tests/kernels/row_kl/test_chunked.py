"""Chunks of rows on a CPU."""

import torch
from support.operators import relations

from rope_kernels import relation_kl
from rope_kernels.row_kl import chunked


def test_the_chunks_do_not_change_the_result(monkeypatch):
    student, teacher = (x.detach().double() for x in relations(2, 2, 50, 32))
    student.requires_grad_()
    expected = relation_kl(student, teacher)
    (grad,) = torch.autograd.grad(expected.sum(), student)
    for rows in (1, 7, 50):
        monkeypatch.setattr(chunked, "_CHUNK_BYTES", 8 * 2 * 2 * 50 * rows)
        actual = relation_kl(student, teacher)
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(torch.autograd.grad(actual.sum(), student)[0], grad, rtol=1e-12, atol=1e-14)
