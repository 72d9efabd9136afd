import pytest
import torch

from rope_kernels import linear_kl_rows
from rope_kernels.vocabulary import linear_kl_rows as module
from rope_kernels.vocabulary.reference import linear_kl_rows_ref

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def problem(dtype=torch.float64, device="cpu", n_rows=21, vocab=37):
    def tensor(*shape):
        return torch.randn(*shape, device=device, dtype=torch.float64).to(dtype)

    hidden, weight, bias = tensor(n_rows, 8), tensor(vocab, 8), tensor(vocab)
    return hidden, hidden + 0.3 * tensor(n_rows, 8), weight, weight + 0.1 * tensor(vocab, 8), bias


def formula(student, teacher, student_weight, teacher_weight, bias, temperature, logits=lambda z: z):
    p = (logits(teacher @ teacher_weight.T) / temperature).softmax(-1)
    q = (logits(student @ student_weight.T + bias) / temperature).softmax(-1)
    return (p * (p / q).log()).sum(-1)


def assert_same_gradients(actual, expected, inputs):
    grads = (torch.autograd.grad(loss, inputs) for loss in (actual, expected))
    for mine, right in zip(*grads, strict=True):
        torch.testing.assert_close(mine, right)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("rows_at_a_time", "temperature"), [(1, 1.0), (5, 2.5), (100, 2.5)])
def test_it_is_the_formula_with_all_its_gradients(rows_at_a_time, temperature, device, monkeypatch):
    monkeypatch.setattr(module, "_CHUNK_BYTES", 4 * 37 * rows_at_a_time)
    student, teacher, student_weight, teacher_weight, bias = problem(device=device)
    inputs = [x.requires_grad_() for x in (student, student_weight, bias)]
    coefficients = torch.rand(21, device=device)
    actual = linear_kl_rows(
        student, teacher, student_weight, teacher_weight, student_bias=bias, temperature=temperature
    )
    expected = formula(student, teacher, student_weight, teacher_weight, bias, temperature)
    torch.testing.assert_close(actual, expected)
    assert_same_gradients((actual * coefficients).sum(), (expected * coefficients).sum(), inputs)


def test_what_a_family_does_to_its_logits_is_done_on_both_sides():
    student, teacher, student_weight, teacher_weight, bias = problem()
    inputs = [x.requires_grad_() for x in (student, student_weight, bias)]
    options = {"temperature": 2.0, "logit_scale": 0.7, "softcap": 1.5}
    actual = linear_kl_rows(student, teacher, student_weight, teacher_weight, student_bias=bias, **options)
    expected = formula(
        student, teacher, student_weight, teacher_weight, bias, 2.0, lambda z: 1.5 * (0.7 * z / 1.5).tanh()
    )
    torch.testing.assert_close(actual, expected)
    twin = linear_kl_rows_ref(student, teacher, student_weight, teacher_weight, student_bias=bias, **options)
    torch.testing.assert_close(twin, expected)
    assert_same_gradients(actual.sum(), expected.sum(), inputs)


def test_low_precision_is_as_exact_as_torch():
    student, teacher, student_weight, teacher_weight, _ = problem(torch.bfloat16)
    actual = linear_kl_rows(student, teacher, student_weight, teacher_weight)
    exact = formula(*(x.double() for x in (student, teacher, student_weight, teacher_weight)), 0, 1.0)
    torch_error = (formula(student, teacher, student_weight, teacher_weight, 0, 1.0) - exact).abs().max()
    assert actual.dtype == torch.float32 and (actual - exact).abs().max() <= 2 * torch_error


def test_a_word_that_both_heads_mask_counts_nothing():
    student, teacher, weight, _, bias = problem()
    masked = torch.cat([bias[:-1], torch.tensor([-torch.inf], dtype=bias.dtype)])
    inputs = [student.requires_grad_(), weight.requires_grad_()]
    actual = linear_kl_rows(student, teacher, weight, weight, student_bias=masked, teacher_bias=masked)
    expected = linear_kl_rows(
        student, teacher, weight[:-1], weight[:-1], student_bias=bias[:-1], teacher_bias=bias[:-1]
    )
    torch.testing.assert_close(actual, expected)
    assert_same_gradients(actual.sum(), expected.sum(), inputs)


def test_what_does_not_fit_is_refused():
    student, teacher, weight, _, _ = problem()
    with pytest.raises(ValueError, match="temperature must be above 0 and finite, got 0"):
        linear_kl_rows(student, teacher, weight, weight, temperature=0)
    with pytest.raises(ValueError, match="logit_scale must be above 0 and finite, got nan"):
        linear_kl_rows(student, teacher, weight, weight, logit_scale=float("nan"))
    with pytest.raises(ValueError, match=r"teacher_weight must be \[V, H\] with H = 8 .*, got \[37, 7\]"):
        linear_kl_rows(student, teacher, weight, weight[:, 1:])
    with pytest.raises(ValueError, match="student_weight must be torch.float64 .* as student_hidden is, got .*float32"):
        linear_kl_rows(student, teacher, weight.float(), weight)
    with pytest.raises(ValueError, match=r"student_bias must be None or \[V\] with V = 37 .*, got \[36\]"):
        linear_kl_rows(student, teacher, weight, weight, student_bias=torch.zeros(36, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"with one N on one device, got \[21, 8\] .* and \[20, 8\]"):
        linear_kl_rows(student, teacher[1:], weight, weight)
    with pytest.raises(ValueError, match="one vocabulary, got 37 and 36 rows"):
        linear_kl_rows(student, teacher, weight, weight[1:])
