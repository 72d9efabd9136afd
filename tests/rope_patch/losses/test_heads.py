"""Losses through heads whose weights are there during their forward and backward alone, as under DeepSpeed ZeRO-3."""

import pytest
import torch
from support.tiny import VOCAB, tiny

from rope_patch.losses.heads import head_kl, head_losses

N, H = 6, 32


def partition(head):
    """Empty the weight, but for forward and backward of its module. Returns what happened, and an undo."""
    weight, whole, events = head.weight, head.weight.data, []
    weight.ds_id = 0  # by which ZeRO-3's parameters are known

    class Parameters(dict):
        """As ZeRO-3's: asking for a weight that is away, if for its dtype alone, gathers it for the model's forward."""

        def __getitem__(self, name):
            if super().__getitem__(name) is weight and not weight.numel():
                events.append("read")
            return super().__getitem__(name)

    head._parameters = Parameters(head._parameters)

    def gather(*_):
        events.append("gather")
        weight.data = whole

    def release(*_):
        events.append("release")
        weight.data = torch.empty(0)

    handles = [
        head.register_forward_pre_hook(gather),
        head.register_forward_hook(release),
        head.register_full_backward_pre_hook(gather),
        head.register_full_backward_hook(release),
    ]
    release()

    def undo():
        gather()
        for handle in handles:
            handle.remove()

    return events, undo


def inputs():
    torch.manual_seed(0)
    student, view, teacher = (torch.randn(N, H, requires_grad=True) for _ in range(3))
    return student, view, teacher, torch.randint(VOCAB, (N,))


def losses(model, other):
    student, view, teacher, labels = inputs()
    ones = torch.ones(N)
    loss, metrics = head_losses(model, student, view, labels, ones, ones, None if other is None else (other, teacher))
    return loss, [student, view], [loss, metrics.ce, metrics.kl]


def divergence(model, other):
    student, _, teacher, _ = inputs()
    loss = head_kl(model, other or model.get_output_embeddings(), student, teacher)
    return loss, [student], [loss]


def outcome(make, partitioned, with_teacher, frozen):
    model = tiny().requires_grad_(not frozen)
    other = tiny(initializer_range=1.0).get_output_embeddings().requires_grad_(False) if with_teacher else None
    head = model.get_output_embeddings()
    heads = [head] + ([other] if with_teacher else [])
    parts = [partition(output_head) for output_head in heads] if partitioned else []
    loss, hidden, values = make(model, other)
    assert all(weight.numel() == 0 for output_head in heads for weight in output_head.parameters()) == partitioned
    loss.backward()
    grads = [x.grad for x in hidden] + ([] if frozen else [weight.grad for weight in head.parameters()])
    for events, undo in parts:
        # once for all chunks; the first release is the partitioning, the last two are of the backward
        assert events == ["release", "gather", "release", "gather", "release"]
        undo()
        assert "forward" not in vars(head)
    return [x.detach() for x in values] + grads


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("with_teacher", [False, True], ids=["alone", "two heads"])
@pytest.mark.parametrize("make", [losses, divergence])
def test_partitioned_heads_give_the_losses_and_gradients_of_whole_ones(make, with_teacher, frozen):
    expected = outcome(make, False, with_teacher, frozen)
    actual = outcome(make, True, with_teacher, frozen)
    for mine, theirs in zip(actual, expected, strict=True):
        assert torch.equal(mine, theirs)


def test_a_head_keeps_its_forward_when_the_loss_raises():
    model = tiny()
    head = model.get_output_embeddings()
    head.forward = patched = lambda x: x
    partition(head)
    student, _, _, _ = inputs()
    with pytest.raises(ValueError, match="labels"):
        head_losses(model, student, None, torch.zeros(N + 1, dtype=torch.int64), torch.ones(N), None)
    assert head.forward is patched


@pytest.mark.parametrize(("whose", "dtype"), [("own", torch.uint8), ("teacher", torch.int8)])
def test_a_quantized_head_is_refused(whose, dtype):
    """As bitsandbytes has it: hidden states cast to its dtype would be integers."""
    model, other = tiny(), tiny().get_output_embeddings()
    broken = model.get_output_embeddings() if whose == "own" else other
    broken.weight = torch.nn.Parameter(broken.weight.data.to(dtype), requires_grad=False)
    hidden, ones, labels = torch.randn(N, H), torch.ones(N), torch.zeros(N, dtype=torch.int64)
    message = f"weights of the output head, which must be floating point, got Linear with {dtype}"
    with pytest.raises(ValueError, match=message):
        head_losses(model, hidden, hidden, labels, ones, ones, teacher=(other, hidden))
    with pytest.raises(ValueError, match=message):
        head_kl(model, other, hidden, hidden)


def test_the_kl_of_heads_has_the_families_transform_and_the_temperature():
    """Forward KL of softcap tanh(scale z / softcap) / T on both sides, with its gradients, in float64."""
    model, other = tiny().double(), tiny(initializer_range=1.0).double().get_output_embeddings()
    model.config.logit_scale, model.config.final_logit_softcapping = 0.7, 1.5
    student, _, teacher, _ = (x.detach().double() for x in inputs())
    weight = model.get_output_embeddings().weight
    given = [student.requires_grad_(), weight]

    def log_probabilities(hidden, weight):
        return (1.5 * (0.7 * hidden @ weight.T / 1.5).tanh() / 2.5).log_softmax(-1)

    log_p, log_q = log_probabilities(teacher, other.weight).detach(), log_probabilities(*given)
    expected = (log_p.exp() * (log_p - log_q)).sum()
    actual = head_kl(model, other, student, teacher, temperature=2.5)
    torch.testing.assert_close(actual, expected)
    for mine, right in zip(*(torch.autograd.grad(kl, given) for kl in (actual, expected)), strict=True):
        torch.testing.assert_close(mine, right)
