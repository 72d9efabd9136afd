import pytest
import torch
from support.operators import IMPLEMENTATIONS, implementation

from rope_kernels import linear_ce_rows, linear_ce_rows_ref


@pytest.fixture(params=IMPLEMENTATIONS[:3])  # no kernel here is Hopper's own
def device(request, monkeypatch):
    dtype = request.node.callspec.params.get("dtype")
    if request.param == "interpreter" and dtype == torch.float16:
        pytest.skip("a CPU rounds products of 16 bits, and then adds the bias")
    return implementation(request.param, monkeypatch, dtype)


def problem(n_rows, hidden_size, vocab_size, *, dtype=torch.float32, device="cpu", bias=False):
    """Rows of unit variance, logits of about unit variance times 3, every third row without a label."""
    hidden = torch.randn(n_rows, hidden_size, device=device).to(dtype)
    weight = (3 * torch.randn(vocab_size, hidden_size, device=device) / hidden_size**0.5).to(dtype)
    labels = torch.randint(vocab_size, (n_rows,), device=device)
    labels[::3] = -100
    return hidden, weight, labels, torch.randn(vocab_size, device=device).to(dtype) if bias else None


def exact(hidden, weight, labels, bias):
    return linear_ce_rows_ref(hidden.double(), weight.double(), labels, bias=None if bias is None else bias.double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
@pytest.mark.parametrize(
    ("n_rows", "hidden_size", "vocab_size"), [(1, 1, 1), (5, 3, 7), (130, 64, 1000)], ids=["one", "ragged", "wide"]
)
def test_linear_ce_rows_is_as_exact_as_torch(n_rows, hidden_size, vocab_size, bias, dtype, device):
    hidden, weight, labels, bias = problem(n_rows, hidden_size, vocab_size, dtype=dtype, device=device, bias=bias)
    expected = exact(hidden, weight, labels, bias)
    logits = torch.nn.functional.linear(hidden, weight, bias).float()
    torch_ce = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    torch_error = (torch_ce - expected).abs().max()
    ce = linear_ce_rows(hidden, weight, labels, bias=bias)
    assert ce.dtype == torch.float32
    assert (ce - expected).abs().max() <= 2 * torch_error + 1e-6 * (1 + expected.abs().max())


@pytest.mark.parametrize("chunk_rows", [1, 7, 20, 1000])
def test_the_chunk_size_does_not_change_the_result(chunk_rows, device):
    hidden, weight, labels, _ = problem(31, 16, 50, device=device)  # 20 of the 31 rows have a label
    whole = linear_ce_rows(hidden, weight, labels)
    torch.testing.assert_close(linear_ce_rows(hidden, weight, labels, chunk_rows=chunk_rows), whole)


def test_rows_without_a_label_give_zero_and_are_never_read(device):
    hidden, weight, labels, _ = problem(9, 4, 11, device=device)
    hidden[labels == -100] = float("nan")
    ce = linear_ce_rows(hidden, weight, labels, chunk_rows=2).cpu()
    assert torch.equal(ce[::3], torch.zeros(3))
    assert (ce[labels.cpu() != -100] > 0).all()


def test_no_row_with_a_label_gives_all_zeros():
    hidden, weight, labels, _ = problem(4, 4, 11)
    assert torch.equal(linear_ce_rows(hidden, weight, labels.fill_(-100)), torch.zeros(4))


def test_no_rows_give_no_values():
    hidden, weight, labels, _ = problem(0, 4, 11)
    assert linear_ce_rows(hidden, weight, labels).shape == (0,)


def test_logits_past_the_range_of_exp_stay_finite(device):
    hidden, weight, labels, _ = problem(6, 8, 20, device=device)
    hidden *= 1000
    torch.testing.assert_close(linear_ce_rows(hidden, weight, labels), exact(hidden, weight, labels, None).float())


def test_no_gradient_flows():
    hidden, weight, labels, _ = problem(6, 8, 20)
    assert not linear_ce_rows(hidden.requires_grad_(), weight.requires_grad_(), labels).requires_grad


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden": torch.zeros(2, 3, 4)}, r"hidden must be \[N, H\] and floating point, got \[2, 3, 4\]"),
        ({"hidden": torch.zeros(6, 4, dtype=torch.int64)}, r"hidden must be .* got \[6, 4\] torch.int64"),
        ({"weight": torch.zeros(9, 5)}, r"weight must be \[V, H\] with H = 4 as in hidden .*, got \[9, 5\]"),
        ({"weight": torch.zeros(9, 4).bfloat16()}, "weight must be torch.float32 .* got .* torch.bfloat16"),
        ({"bias": torch.zeros(8)}, r"bias must be None or \[V\] with V = 9 as in weight, got \[8\]"),
        ({"bias": torch.zeros(9).double()}, "bias must be torch.float32 .* got .* torch.float64"),
        ({"labels": torch.zeros(5, dtype=torch.int64)}, r"labels must be \[6\] int64 .* got \[5\]"),
        ({"labels": torch.zeros(6)}, r"labels must be \[6\] int64 .* got \[6\] torch.float32"),
        ({"labels": torch.tensor([0, 8, -100, 9, 0, 0])}, r"labels must be in \[0, 9\) or -100, got 9"),
        ({"labels": torch.tensor([0, 8, -100, -1, 0, 0])}, r"labels must be in \[0, 9\) or -100, got -1"),
        ({"chunk_rows": 0}, "chunk_rows must be a whole number, at least 1, or None, got 0"),
        ({"chunk_rows": True}, "chunk_rows must be a whole number, at least 1, or None, got True"),
        ({"weight": torch.zeros(0, 4)}, r"weight must be .* V at least 1, got \[0, 4\]"),
        ({"labels": [0] * 6}, r"labels must be \[6\] int64, a tensor, got \[0, 0, 0, 0, 0, 0\]"),
        ({"hidden": None}, "hidden must be .* a tensor, got None"),
    ],
)
def test_what_does_not_fit_is_named(changes, message):
    arguments = {"hidden": torch.zeros(6, 4), "weight": torch.zeros(9, 4), "labels": torch.zeros(6, dtype=torch.int64)}
    with pytest.raises(ValueError, match=message):
        linear_ce_rows(**(arguments | changes))
