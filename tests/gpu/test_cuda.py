"""What only a GPU can show: bf16, flex attention with gradients, inductor, frequencies that reload to the same bits."""

import pytest
import torch
from support import oracle
from support.tiny import FAMILIES, SLIDING_WINDOW, tiny, tokens
from transformers import AutoModelForCausalLM

from rope_patch import native_rope, patch_model, rope_view, unpatch_model
from rope_patch.base.draws import DrawKey
from rope_patch.forward.drawn_view import Batch
from rope_patch.forward.sources import ViewSource
from rope_patch.views import Cyclic, Cycling, Dilation, Discrete, Linear, PosAug, RandomBase, Skip, Step, Uniform

pytestmark = pytest.mark.gpu
L = 24


def test_draws_are_the_same_on_both_devices():
    words = [
        DrawKey(3, torch.tensor(5, device=d), torch.arange(100, device=d)[:, None]).uniform(0).cpu()
        for d in ("cpu", "cuda")
    ]
    assert torch.equal(*words)


@pytest.mark.parametrize(
    "view",
    [
        PosAug(),
        PosAug(Step(Cycling([1, 2, 4, 8]))),
        PosAug(Discrete([1, 2, 4, 8]), "sample"),
        PosAug(Linear(Uniform(1 / 8, 8), start=[0.5, 2]), "micro-batch"),
        Skip(),
        Skip(skip=Linear(Uniform(1), start=0)),
        Cyclic(),
        Dilation(),
        RandomBase(),
    ],
    ids=lambda view: view.name,
)
def test_a_draw_does_not_wait_for_the_gpu(view):
    source, on_cpu = ViewSource(view, seed=3), ViewSource(view, seed=3)
    for each in (source, on_cpu):
        each.clock.set(1, 0, 0.75)  # a curriculum asks for it
    batch = Batch(2, 64, torch.device("cuda", 0), None, None, cached=0, training=True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        index = source.bind(batch)(torch.arange(64, device="cuda")[None])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    bound = on_cpu.bind(Batch(2, 64, torch.device("cpu"), None, None, cached=0, training=True))
    torch.testing.assert_close(index.cpu(), bound(torch.arange(64)[None]))


@pytest.mark.parametrize("attention", ["eager", "sdpa", "flex_attention"])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_under_a_view_are_those_of_the_oracle(family, attention):
    model = tiny(family, attention, head_dim=16, hidden_size=64).cuda().train()
    ids = tokens(2, 130)
    with rope_view(model, Skip(split=40, skip=500)):
        logits = model(ids.cuda(), use_cache=False).logits
    direction = torch.randn(logits.shape)
    (logits * direction.cuda()).sum().backward()
    weights = oracle.weights_of(model.cpu())
    t = torch.arange(130)
    window = SLIDING_WINDOW if family == "mistral-sliding" else None
    visible = oracle.causal(130, window).expand(2, 130, 130)
    expected = oracle.logits(weights, model.config, ids, torch.where(t >= 40, t + 500, t).expand(2, -1), visible)
    (expected * direction).sum().backward()
    for name, parameter in model.named_parameters():
        error = (parameter.grad.cpu() - weights[name].grad).norm() / weights[name].grad.norm()
        assert error < 2e-3, f"gradient of {name} is off by {error:.1e}"


@pytest.mark.parametrize("method", ["yarn", "pi"])
@torch.no_grad()
def test_reload_on_the_gpu_gives_the_same_bits(method, tmp_path):
    model = patch_model(tiny(dtype=torch.bfloat16).cuda(), method, factor=4.0)
    ids = tokens(2, L).cuda()
    model.save_pretrained(tmp_path)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).cuda()
    assert torch.equal(reloaded(ids).logits, model(ids).logits)
    cast = tiny(dtype=torch.bfloat16).cuda()  # its frequencies are rounded, which a patch heals and its undo restores
    healed = patch_model(tiny(dtype=torch.bfloat16).cuda(), "standard")
    with native_rope(model):
        assert torch.equal(model(ids).logits, healed(ids).logits)
    assert torch.equal(unpatch_model(model)(ids).logits, cast(ids).logits)


@torch.no_grad()
def test_undo_after_a_move_between_devices():
    model = patch_model(tiny(), "yarn", factor=4.0).cuda()
    ids = tokens(1, L).cuda()
    model(ids)
    assert torch.equal(unpatch_model(model)(ids).logits, tiny().cuda()(ids).logits)


def test_inductor_takes_new_draws_without_compiling_again():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    ids = tokens(2, 64).cuda()
    eager, compiled = (patch_model(tiny().cuda(), PosAug()).train() for _ in range(2))
    run = torch.compile(compiled, fullgraph=True)
    losses = [[m(ids, labels=ids, use_cache=False).loss.item() for _ in range(4)] for m in (eager, run)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
