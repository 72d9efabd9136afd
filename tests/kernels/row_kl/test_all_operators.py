"""What `relation_kl`, `attention_map_kl` and `relation_mse` have in common: any shape, every gradient, refusals."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.operators import IMPLEMENTATIONS, check_attention_map, check_relation, implementation, relations, visible

from rope_kernels import (
    Visibility,
    attention_map_kl,
    attention_map_kl_ref,
    make_visibility,
    relation_kl,
    relation_kl_ref,
    relation_mse,
)
from rope_kernels.row_kl.reference import relation_mse_ref


def packed(batch, n):
    return Visibility.of_documents(torch.zeros(batch, n, dtype=torch.int32))


@settings(max_examples=5, deadline=None, derandomize=True)
@given(
    batch=st.integers(1, 2),
    n_heads=st.integers(1, 2),
    n=st.integers(1, 80),
    head_dim=st.sampled_from([32, 80, 96, 128, 256]),
    causal=st.booleans(),
    padding=st.sampled_from(["none", "left", "right", "holes"]),
    packed=st.booleans(),
    seed=st.integers(0, 2**31),
)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_any_shape_padding_and_packing(name, batch, n_heads, n, head_dim, causal, padding, packed, seed):
    with pytest.MonkeyPatch.context() as monkeypatch:
        device = implementation(name, monkeypatch)
        torch.manual_seed(seed)
        student, teacher = relations(batch, n_heads, n, head_dim, device=device)
        key_mask = None if padding == "none" else torch.ones(batch, n, dtype=torch.bool)
        for b in range(batch) if key_mask is not None else ():
            cut = int(torch.randint(0, n + 1, ()))  # a row may be padding as a whole
            if padding == "left":
                key_mask[b, :cut] = False
            elif padding == "right":
                key_mask[b, cut:] = False
            else:
                key_mask[b] = torch.rand(n) < 0.7
        documents, cu_seqlens = None, None
        if packed:
            new = (torch.rand(batch, n) < 0.1).int()
            new[:, 0] = 1
            documents = new.cumsum(1).tolist()
            cu_seqlens = torch.tensor([*new.flatten().nonzero().flatten().tolist(), batch * n], dtype=torch.int32)
        seen = visible(n, causal=causal, key_mask=key_mask, documents=documents, device=device)
        key_mask, cu_seqlens = (None if x is None else x.to(device) for x in (key_mask, cu_seqlens))
        weight = torch.rand(batch, n_heads, n, device=device)
        visible_keys = {"causal": causal, "key_mask": key_mask, "cu_seqlens": cu_seqlens}
        kl = check_relation(student, teacher, seen, weight, **visible_keys)
        if key_mask is not None:
            assert (kl[(~key_mask)[:, None].expand_as(kl)] == 0).all()
        q, k = student.detach().requires_grad_(), teacher.detach()[:, :1].requires_grad_()
        teacher_q = teacher + 0.1
        visibility = make_visibility(batch, n, kl.device, **visible_keys)
        check_attention_map(q, k, teacher_q, k.detach(), seen, weight, visibility=visibility)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    batch=st.integers(1, 3),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 3),
    n=st.integers(1, 17),
    causal=st.booleans(),
    padding=st.sampled_from(["none", "left", "right"]),
    border=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 2**31),
)
def test_float64_equals_the_twin_with_every_gradient(batch, kv_heads, group, n, causal, padding, border, seed):
    """GQA, padding, packed documents (at a border before each token, documents of one token), all three operators."""
    torch.manual_seed(seed)
    heads = kv_heads * group
    student_q, teacher_q = (torch.randn(batch, heads, n, 8, dtype=torch.float64) for _ in range(2))
    student_k, teacher_k = (torch.randn(batch, kv_heads, n, 8, dtype=torch.float64) for _ in range(2))
    leaves = [student_q.requires_grad_(), student_k.requires_grad_()]
    key_mask = torch.ones(batch, n, dtype=torch.bool)
    for b in range(batch) if padding != "none" else ():
        cut = int(torch.randint(0, n + 1, ()))
        key_mask[b, slice(0, cut) if padding == "left" else slice(cut, n)] = False
    new = torch.rand(batch, n) < border
    new[:, 0] = True
    borders = [*new.flatten().nonzero().flatten().tolist(), batch * n]
    seen = visible(n, causal=causal, key_mask=key_mask, documents=new.cumsum(1).tolist())
    given = {"causal": causal, "key_mask": key_mask, "cu_seqlens": borders}
    weight = torch.rand(batch, heads, n, dtype=torch.float64)

    pairs = [
        (relation_kl(student_q, teacher_q, **given), relation_kl_ref(student_q, teacher_q, seen)),
        (relation_mse(student_q, teacher_q, **given), relation_mse_ref(student_q, teacher_q, seen)),
        (
            attention_map_kl(student_q, student_k, teacher_q, teacher_k, **given),
            attention_map_kl_ref(student_q, student_k, teacher_q, teacher_k, seen),
        ),
    ]
    for actual, expected in pairs:
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)
        assert not actual.masked_select(~seen.any(-1).expand_as(actual)).any()
        grads = (torch.autograd.grad((x * weight).sum(), leaves, allow_unused=True) for x in (actual, expected))
        for mine, right in zip(*grads, strict=True):
            assert (mine is None) == (right is None)
            if mine is not None:
                torch.testing.assert_close(mine, right.nan_to_num(0.0), rtol=1e-9, atol=1e-12)


def call(operator, change):
    """`operator` of 8 tokens, but for what `change` gives it in place of its arguments."""
    student, teacher = torch.zeros(1, 2, 8, 32), torch.zeros(1, 2, 8, 32)
    arguments = {"student": student, "teacher": teacher, **change}
    if operator is attention_map_kl:
        q, teacher_q = arguments.pop("student"), arguments.pop("teacher")
        arguments |= {"student_q": q, "student_k": student, "teacher_q": teacher_q, "teacher_k": teacher}
    return operator(**arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"student": torch.zeros(2, 3, 4)}, r"student must be \[batch, n_heads, n, head_dim\].*got \[2, 3, 4\]"),
        ({"student": torch.zeros(1, 2, 8, 32, dtype=torch.int64)}, "student must be .* float64, got .* torch.int64"),
        ({"teacher": torch.zeros(1, 2, 8, 16)}, r"teacher must be \[1, 2, 8, 32\] torch.float32.*got \[1, 2, 8, 16\]"),
        ({"teacher": torch.zeros(1, 2, 8, 32).half()}, "teacher must be .* as student is, got .*torch.float16"),
        ({"teacher": None}, r"teacher must be \[1, 2, 8, 32\] torch.float32 on cpu as student is, got None"),
        ({"key_mask": torch.ones(1, 7, dtype=torch.bool)}, r"key_mask must be \[1, 8\] bool on cpu, got \[1, 7\]"),
        ({"key_mask": torch.ones(1, 8)}, "key_mask must be .* bool .* got .*float32"),
        ({"key_mask": [True] * 8}, r"key_mask must be \[1, 8\] bool on cpu, a tensor, got \[True, "),
        ({"causal": "no"}, "causal must be True or False, got 'no'"),
        ({"causal": torch.ones(1, 8, dtype=torch.bool)}, r"causal must be True or False, got \[1, 8\] torch.bool"),
        ({"cu_seqlens": torch.tensor([0, 4])}, r"rising from 0 to 8, got \[0, 4\]"),
        ({"cu_seqlens": torch.tensor([0, 4, 4, 8])}, "rising from 0 to 8"),
        ({"cu_seqlens": torch.tensor([0.0, 8.0])}, r"integers.*got \[2\] torch.float32"),
        ({"cu_seqlens": torch.tensor([[0, 8]])}, r"integers.*got \[1, 2\] torch.int64"),
        ({"cu_seqlens": [1, 8]}, r"rising from 0 to 8, got \[1, 8\]"),
        ({"cu_seqlens": [0, 4.0, 8]}, r"cu_seqlens must be .*, a tensor or a list, got \[0, 4.0, 8\]"),
        ({"cu_seqlens": 8}, "cu_seqlens must be .*, a tensor or a list, got 8"),
        ({"visibility": True}, "visibility must be a Visibility or None, got True"),
        ({"visibility": packed(1, 9)}, r"visibility must be of \[1, 8\] tokens on cpu .* got one of \[1, 9\]"),
        ({"visibility": packed(2, 8)}, r"visibility must be of \[1, 8\] tokens on cpu .* got one of \[2, 8\]"),
        (
            {"visibility": Visibility.of_documents(torch.zeros(1, 8, dtype=torch.int32, device="meta"))},
            r"visibility must be of \[1, 8\] tokens on cpu .* on meta",
        ),
        *(
            ({"visibility": packed(1, 8), name: value}, f"{name} must be None beside visibility")
            for name, value in (
                ("causal", False),
                ("key_mask", torch.ones(1, 8, dtype=torch.bool)),
                ("cu_seqlens", [0, 8]),
            )
        ),
        *(
            ({"student_scale": scale}, f"student_scale must be above 0 and finite, or None for .*, got {scale!r}")
            for scale in (0, -1.0, float("nan"), float("inf"), True, "1")
        ),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        call(relation_kl, change)


@pytest.mark.parametrize("operator", [relation_kl, relation_mse, attention_map_kl], ids=lambda f: f.__name__)
def test_each_operator_checks_its_arguments(operator):
    for change, name in (
        ({"student": torch.zeros(2, 3, 4)}, "student"),
        ({"teacher": None}, "teacher"),
        ({"visibility": packed(1, 7)}, "visibility"),
        ({"teacher_scale": 0}, "teacher_scale"),
    ):
        with pytest.raises(ValueError, match=f"^{name}.* must be "):
            call(operator, change)


def test_documents_end_with_rows():
    two = torch.zeros(2, 1, 4, 32)
    with pytest.raises(ValueError, match="every start of a row, multiples of 4"):
        relation_kl(two, two, cu_seqlens=torch.tensor([0, 3, 8]))
