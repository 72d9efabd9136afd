"""`linear_ce_kl` against all logits at once in float64: value, every gradient, every row's metrics."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.operators import IMPLEMENTATIONS, implementation

from rope_kernels import linear_ce_kl, linear_ce_kl_ref

IMPLEMENTATIONS = IMPLEMENTATIONS[:3]  # no kernel here is Hopper's own
N, V = 11, 21
DIRECTIONS = ["reverse", "forward", "jsd"]
HEADS = [{}, {"logit_scale": 0.3}, {"softcap": 3.0}, {"logit_scale": 2.0, "softcap": 5.0}]


@pytest.fixture(params=IMPLEMENTATIONS)
def device(request, monkeypatch):
    return implementation(request.param, monkeypatch)


@pytest.fixture
def dtype(request, device):
    """The dtype in which the implementation is exact."""
    return torch.float64 if "chunked" in request.node.name else torch.float32


def problem(n_rows=N, hidden=8, vocab=V, *, dtype=torch.float64, device="cpu"):
    """Rows with a label and a KL, with one of them, and with neither."""

    def tensor(*shape):
        return torch.randn(*shape, device=device, dtype=torch.float64)

    std, weight, bias = tensor(n_rows, hidden), tensor(vocab, hidden), tensor(vocab)
    inputs = [x.to(dtype).requires_grad_() for x in (std, std + 0.3 * tensor(n_rows, hidden), weight, bias)]
    labels = torch.randint(0, vocab, (n_rows,), device=device)
    labels[::3] = -100
    ce_weight, kl_weight = torch.rand(n_rows, device=device), torch.rand(n_rows, device=device)
    kl_weight[1::4] = 0
    return inputs, labels, ce_weight, kl_weight


def both(inputs, labels, ce_weight, kl_weight, direction, head, **options):
    """Our scalar, metrics and gradients, and those of the formula in float64."""
    std, view, weight, bias = inputs
    loss, rows = linear_ce_kl(std, view, weight, labels, ce_weight, kl_weight, direction, bias=bias, **head, **options)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    in_double = {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in head.items()}
    expected = linear_ce_kl_ref(
        *exact[:3], labels, ce_weight.double(), kl_weight.double(), direction, bias=exact[3], **in_double
    )
    grads = torch.autograd.grad(3 * loss, inputs, retain_graph=True)
    return loss, rows, grads, expected, torch.autograd.grad(3 * expected, exact)


def assert_close(results, dtype):
    """The loss and the gradients that `both` returned."""
    loss, _, grads, expected, expected_grads = results
    torch.testing.assert_close(loss, expected.to(dtype))
    for actual, right in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(actual, right.to(dtype), atol=1e-5 if dtype == torch.float32 else 1e-7, rtol=1e-5)


@pytest.mark.parametrize(
    ("direction", "head", "chunk_rows"),
    [
        ("reverse", HEADS[0], 1),
        ("reverse", HEADS[3], None),
        ("forward", HEADS[1], 4),
        ("forward", HEADS[2], None),
        ("jsd", HEADS[0], None),
        ("jsd", HEADS[3], 4),
    ],
)
def test_it_is_the_formula_with_all_its_gradients(direction, head, chunk_rows, device, dtype):
    data = problem(device=device, dtype=dtype)
    assert_close(both(*data, direction, head, chunk_rows=chunk_rows), dtype)


@pytest.mark.parametrize(
    ("direction", "head", "chunk_rows"), [("reverse", HEADS[2], 4), ("forward", HEADS[3], None), ("jsd", HEADS[0], 4)]
)
def test_a_teacher_takes_the_place_of_the_standard_view_in_the_kl(direction, head, chunk_rows, device, dtype):
    data = problem(device=device, dtype=dtype)
    teacher = {
        "teacher_hidden": torch.randn(N, 5, device=device, dtype=dtype, requires_grad=True),
        "teacher_weight": torch.randn(V, 5, device=device, dtype=dtype, requires_grad=True),
        "teacher_bias": torch.randn(V, device=device, dtype=dtype),
    }
    results = both(*data, direction, {**head, **teacher}, chunk_rows=chunk_rows)
    assert_close(results, dtype)
    _, without = linear_ce_kl(*data[0][:3], *data[1:], direction, bias=data[0][3], **head)
    for name in ("ce", "entropy", "is_top1"):
        torch.testing.assert_close(getattr(results[1], name), getattr(without, name))
    assert not torch.allclose(results[1].kl, without.kl)


def test_metrics_are_those_of_the_standard_view(device, dtype):
    (std, view, weight, bias), labels, ce_weight, kl_weight = problem(device=device, dtype=dtype)
    _, rows = linear_ce_kl(std, view, weight, labels, ce_weight, kl_weight, bias=bias)
    logits = std @ weight.T + bias
    q, p = logits.softmax(-1), (view @ weight.T + bias).softmax(-1)
    labelled = labels != -100
    torch.testing.assert_close(rows.ce[labelled], -q[labelled, labels[labelled]].log())
    torch.testing.assert_close(rows.entropy[labelled], -(q * q.log()).sum(-1)[labelled])
    assert torch.equal(rows.is_top1, (logits.argmax(-1) == labels) & labelled)
    torch.testing.assert_close(rows.kl, torch.where(kl_weight != 0, (p * (p / q).log()).sum(-1), 0.0))
    assert not (rows.ce[~labelled].any() or rows.entropy[~labelled].any())
    assert not any(x.requires_grad for x in (rows.ce, rows.kl, rows.entropy))


def test_the_standard_side_of_the_kl_is_a_constant():
    (std, view, weight, bias), labels, _, kl_weight = problem()
    loss, _ = linear_ce_kl(std, view, weight, labels, torch.zeros(N), kl_weight, bias=bias)
    grad_std, grad_view = torch.autograd.grad(loss, [std, view])
    assert not grad_std.any() and grad_view.any()


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    n_rows=st.integers(0, 9),
    vocab=st.integers(5, 40),
    direction=st.sampled_from(DIRECTIONS),
    head=st.sampled_from(HEADS),
    chunk_rows=st.one_of(st.none(), st.integers(1, 40)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    size=st.sampled_from([1.0, 1e-6, 1e5]),
    seed=st.integers(0, 2**31),
)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_low_precision_is_as_exact_as_torch(name, n_rows, vocab, direction, head, chunk_rows, dtype, size, seed):
    """Also where weights are tiny: 16-bit gradients of a token among millions must not vanish."""
    if name == "interpreter" and dtype == torch.bfloat16:
        return  # numpy has no bfloat16
    with pytest.MonkeyPatch.context() as monkeypatch:
        compare(implementation(name, monkeypatch), n_rows, vocab, direction, head, chunk_rows, dtype, size, seed)


def compare(device, n_rows, vocab, direction, head, chunk_rows, dtype, size, seed):
    torch.manual_seed(seed)
    inputs, labels, ce_weight, kl_weight = problem(n_rows, 16, vocab, dtype=dtype, device=device)
    ce_weight, kl_weight = ce_weight * size, kl_weight * size
    loss, _, grads, expected, rights = both(
        inputs, labels, ce_weight, kl_weight, direction, head, chunk_rows=chunk_rows
    )
    plain = linear_ce_kl_ref(
        *inputs[:3], labels, ce_weight.to(dtype), kl_weight.to(dtype), direction, bias=inputs[3], **head
    )
    if not plain.isfinite():
        return  # float16's own range
    rounding = 1e-6 * size  # a KL is a difference of log-sum-exps, each rounded to 1e-7 of itself
    slack = 2 * (plain.double() - expected).abs() + (2e-2 if dtype != torch.float32 else 1e-5) * expected.abs()
    assert (loss.double() - expected).abs() <= slack + rounding
    if dtype == torch.float16 and size != 1.0:
        return  # the gradients themselves are out of its range
    for mine, their, right in zip(grads, torch.autograd.grad(3 * plain, inputs), rights, strict=True):
        error = (mine.double() - right).norm()
        # a few roundings, which torch's happen to cancel in small sums
        floor = 1e-5 if dtype == torch.float32 else 2**-7
        assert error <= 2 * (their.double() - right).norm() + floor * right.norm() + 3 * rounding


def test_longce_factors_are_constants_of_the_sweep(device, dtype):
    """w = min(e^(ce_short - ce), gamma), no gradient through it; 1 for tokens without a short context's loss."""
    (std, view, weight, bias), labels, ce_weight, kl_weight = problem(device=device, dtype=dtype)
    logits = (std @ weight.T + bias).detach()
    near = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    reference = near + torch.linspace(-2, 2, len(labels), device=device)
    reference[::4] = float("nan")
    loss, rows = linear_ce_kl(
        std, view, weight, labels, ce_weight, kl_weight, bias=bias, ce_reference=reference, ce_cap=1.5
    )
    grads = torch.autograd.grad(loss, [std, view, weight, bias])
    exact = [x.detach().double().requires_grad_() for x in (std, view, weight, bias)]
    nll = torch.nn.functional.cross_entropy(exact[0] @ exact[2].T + exact[3], labels, reduction="none").detach()
    factor = torch.where(reference.isnan(), 1.0, (reference.double() - nll).exp().clamp(max=1.5))
    expected = linear_ce_kl_ref(*exact[:3], labels, factor * ce_weight, kl_weight.double(), bias=exact[3])
    labelled = labels != -100
    assert (rows.ce_factor[labelled] == 1.5).any() and (rows.ce_factor[labelled] == 1).any()
    tolerance = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 1e-7, "rtol": 1e-6}
    torch.testing.assert_close(rows.ce_factor[labelled], factor[labelled].to(dtype), **tolerance)
    torch.testing.assert_close(loss, expected.to(dtype), **tolerance)
    for mine, right in zip(grads, torch.autograd.grad(expected, exact), strict=True):
        torch.testing.assert_close(mine, right.to(dtype), **tolerance)


def test_a_frozen_head_gets_no_gradient_and_costs_no_product():
    (std, view, weight, bias), labels, ce_weight, kl_weight = problem()
    frozen = weight.detach()
    loss, _ = linear_ce_kl(std, view, frozen, labels, ce_weight, kl_weight, bias=bias.detach())
    loss.backward()
    assert frozen.grad is None and std.grad is not None and view.grad is not None


def test_tied_embeddings_get_both_parts():
    embedding = torch.randn(11, 6, dtype=torch.float64, requires_grad=True)
    ids, labels = torch.tensor([1, 2, 3]), torch.tensor([2, 3, 4])
    hidden = embedding[ids]
    ones = torch.ones(3)
    loss, _ = linear_ce_kl(hidden, hidden * 1.1, embedding, labels, ones, ones)
    expected = linear_ce_kl_ref(hidden, hidden * 1.1, embedding, labels, ones.double(), ones.double())
    torch.testing.assert_close(
        torch.autograd.grad(loss, embedding, retain_graph=True)[0], torch.autograd.grad(expected, embedding)[0]
    )


def test_cross_entropy_alone_needs_no_view():
    (std, _, weight, _), labels, ce_weight, _ = problem()
    loss, rows = linear_ce_kl(std, None, weight, labels, ce_weight, None)
    nll = torch.nn.functional.cross_entropy(std @ weight.T, labels, reduction="none")
    torch.testing.assert_close(loss, (ce_weight * nll).sum())
    assert not rows.kl.any()


def test_a_head_that_masks_words(device, dtype):
    """Words at -inf, as a padded vocabulary has them: probability 0 on both sides, and no nan."""
    (std, view, weight, bias), labels, ce_weight, kl_weight = problem(device=device, dtype=dtype)
    labels[labels == 5] = 6
    with torch.no_grad():
        bias[5] = -float("inf")
    for direction in DIRECTIONS:
        loss, rows = linear_ce_kl(std, view, weight, labels, ce_weight, kl_weight, direction, bias=bias)
        grads = torch.autograd.grad(loss, [std, view, weight])
        assert loss.isfinite() and all(x.isfinite().all() for x in (*grads, rows.ce, rows.kl, rows.entropy))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": torch.full((11,), 21)}, r"labels must be in \[0, 21\) or -100, got 21"),
        ({"direction": "both"}, r"direction must be one of .*, got 'both'"),
        ({"hidden_view": torch.zeros(10, 8, dtype=torch.float64)}, r"hidden_view must be \[11, 8\] .*, got \[10, 8\]"),
        ({"hidden_view": None}, "must both be given, or both be None"),
        ({"ce_weight": torch.zeros(10)}, r"ce_weight must be \[11\] floating point"),
        ({"kl_weight": torch.zeros(11, requires_grad=True)}, "kl_weight is a constant here: detach it"),
        ({"labels": torch.full((11,), -1)}, r"labels must be in \[0, 21\) or -100, got -1"),
        ({"labels": torch.zeros(11, dtype=torch.int32)}, r"labels must be \[11\] int64 .*, got \[11\] torch.int32"),
        ({"ce_weight": [1.0] * 11}, r"ce_weight must be \[11\] floating point on cpu, a tensor, got \[1.0, 1.0"),
        ({"ce_weight": torch.ones(11, dtype=torch.int64)}, r"ce_weight must be \[11\] floating .*, got .* torch.int64"),
        ({"ce_reference": torch.zeros(10)}, r"ce_reference must be \[11\] floating point on cpu, got \[10\]"),
        ({"ce_reference": torch.zeros(11, dtype=torch.int64)}, r"ce_reference must be .*, got \[11\] torch.int64"),
        ({"ce_cap": float("nan")}, "ce_cap must be above 0, got nan"),
        ({"logit_scale": float("inf")}, "logit_scale must be above 0 and finite, got inf"),
        ({"softcap": 0.0}, "softcap must be above 0 and finite, or None for none, got 0.0"),
        ({"teacher_hidden": torch.zeros(11, 4)}, "teacher_hidden and teacher_weight go together"),
        (
            {"teacher_hidden": torch.zeros(9, 4), "teacher_weight": torch.zeros(21, 4)},
            r"teacher_hidden must be \[N, H_t\], N and device as in hidden_view, got \[9, 4\]",
        ),
        (
            {"teacher_hidden": torch.zeros(11, 4), "teacher_weight": torch.zeros(21, 5)},
            r"teacher_weight must be \[V, H\] with H = 4 as in teacher_hidden .*, got \[21, 5\]",
        ),
        (
            {"teacher_hidden": torch.zeros(11, 4), "teacher_weight": torch.zeros(21, 4).half()},
            "teacher_weight must be torch.float32 on cpu as teacher_hidden is, got .* torch.float16",
        ),
        (
            {
                "teacher_hidden": torch.zeros(11, 4),
                "teacher_weight": torch.zeros(21, 4),
                "teacher_bias": torch.zeros(20),
            },
            r"teacher_bias must be None or \[V\] with V = 21 as in teacher_weight, got \[20\]",
        ),
        (
            {"teacher_hidden": torch.zeros(11, 4), "teacher_weight": torch.zeros(19, 4)},
            r"teacher_weight must be \[21, 4\], one vocabulary for both, got \[19, 4\]",
        ),
        ({"chunk_rows": 0}, "chunk_rows must be a whole number, at least 1, or None, got 0"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(change, message):
    (std, view, weight, _), labels, ce_weight, kl_weight = problem()
    arguments = {"hidden_std": std, "hidden_view": view, "weight": weight, "labels": labels, "ce_weight": ce_weight}
    with pytest.raises(ValueError, match=message):
        linear_ce_kl(**{**arguments, "kl_weight": kl_weight, **change})


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_no_gradient_is_formed_where_none_can_be_asked_for(direction, device, dtype, monkeypatch):
    """The forward forms them, so evaluation and frozen inputs must say so before it runs."""
    (std, view, weight, bias), labels, ce_weight, kl_weight = problem(dtype=dtype, device=device)
    expected = linear_ce_kl(std, view, weight, labels, ce_weight, kl_weight, direction, bias=bias)[0]

    def refuse(*_):
        raise AssertionError("a product for a gradient")

    monkeypatch.setattr("rope_kernels.vocabulary.chunked._add_product", refuse)
    with torch.no_grad():
        actual = linear_ce_kl(std, view, weight, labels, ce_weight, kl_weight, direction, bias=bias)[0]
    torch.testing.assert_close(actual, expected.detach())
    linear_ce_kl(std, view, weight.detach(), labels, ce_weight, kl_weight, bias=bias.detach())
    with pytest.raises(AssertionError, match="a product for a gradient"):
        linear_ce_kl(std, view, weight, labels, ce_weight, kl_weight, bias=bias)
