"""`relation_mse` and its twin against loops over rows."""

import torch

from rope_kernels import relation_mse
from rope_kernels.row_kl import chunked
from rope_kernels.row_kl.reference import relation_mse_ref


def test_it_is_the_formula_with_its_gradient(monkeypatch):
    """Two rows, left padding in the second, three rows of maps at a time."""
    monkeypatch.setattr(chunked, "_CHUNK_BYTES", 8 * 2 * 3 * 10 * 3)
    student = torch.randn(2, 3, 10, 4, dtype=torch.float64, requires_grad=True)
    teacher = student.detach() + torch.randn(2, 3, 10, 4, dtype=torch.float64)
    key_mask = torch.ones(2, 10, dtype=torch.bool)
    key_mask[1, :4] = False
    actual = relation_mse(student, teacher, key_mask=key_mask, student_scale=0.7)
    expected = torch.zeros(2, 3, 10, dtype=torch.float64)
    for b, first in ((0, 0), (1, 4)):
        for i in range(first, 10):
            keys = slice(first, i + 1)
            s = (0.7 * (student[b, :, i, None] * student[b, :, keys]).sum(-1)).softmax(-1)
            t = (0.5 * (teacher[b, :, i, None] * teacher[b, :, keys]).sum(-1)).softmax(-1)
            expected[b, :, i] = (s - t).square().sum(-1)
    torch.testing.assert_close(actual, expected)
    seen = torch.ones(10, 10, dtype=torch.bool).tril() & (key_mask[:, None, :, None] & key_mask[:, None, None, :])
    torch.testing.assert_close(relation_mse_ref(student, teacher, seen, student_scale=0.7), expected)
    coefficients = torch.rand(2, 3, 10)
    mine, right = (torch.autograd.grad((kl * coefficients).sum(), student)[0] for kl in (actual, expected))
    torch.testing.assert_close(mine, right)
