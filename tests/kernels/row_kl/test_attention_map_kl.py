"""`attention_map_kl` on every implementation, against dense float64 maps with repeated keys."""

import pytest
import torch
from support.operators import check_attention_map, relations, visible

from rope_kernels import attention_map_kl

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    ("heads", "dtype"), [((2, 2), F32), ((4, 2), F32), ((4, 2), BF16), ((4, 2), F16), ((3, 1), F16)], ids=str
)
def test_attention_map_kl_is_as_exact_as_torch(heads, dtype, device):
    n_heads, n_kv_heads = heads
    q, teacher_q = relations(2, n_heads, 50, 32, dtype=dtype, device=device)
    k, teacher_k = relations(2, n_kv_heads, 50, 32, dtype=dtype, device=device)
    seen = visible(50, device=device)
    check_attention_map(q, k, teacher_q, teacher_k, seen, torch.rand(2, n_heads, 50, device=device))


def test_keys_that_do_not_divide_the_queries_are_refused():
    q, k = torch.zeros(1, 4, 8, 32), torch.zeros(1, 3, 8, 32)
    with pytest.raises(
        ValueError, match=r"student_k must be \[1, n_kv_heads, 8, 32\].*a divisor of 4, got \[1, 3, 8, 32\]"
    ):
        attention_map_kl(q, k, q, k)
