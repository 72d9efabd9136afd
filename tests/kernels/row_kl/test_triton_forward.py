"""What of the forward kernel no loss shows."""

import pytest
import torch
from support.operators import relations

from rope_kernels import Visibility
from rope_kernels.row_kl import custom_op, triton_forward


def test_repair_computes_blocks_with_nan_and_leaves_the_others(device):
    """What the Hopper kernels leave to these: a row that holds a nan, and no other block."""
    if not custom_op.runs_on_triton(torch.empty(0, device=device)):
        pytest.skip("chunked torch has no repair")
    student, teacher = (x.detach() for x in relations(1, 2, 300, 32, device=device))
    inputs = (student, student, teacher, teacher, 0.2, 0.2, Visibility(True))
    expected, wanted_parts = triton_forward.row_kl_forward(*inputs)
    kl, parts = torch.full_like(expected, 7.0), torch.full_like(wanted_parts, 7.0)
    kl[0, 1, 290] = float("nan")
    triton_forward.repair(inputs, kl, parts)
    touched = kl != 7.0
    assert touched[0, 1, 290] and not touched[0, 0].any() and not touched[0, 1, :128].any()
    assert torch.equal(kl[touched], expected[touched])
    assert torch.equal(parts[:, touched], wanted_parts[:, touched])
