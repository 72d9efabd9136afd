"""Tiles of tokens: the same output and gradients, no additional work under checkpoints, and modules put back."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.tiny import gemma3, tiny, tokens
from torch import nn

from trl_ext.memory.tiled import tiled, tiled_modules


def gradients(model, ids, tile=None, checkpointed=False):
    model = copy.deepcopy(model).train()
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    torch.manual_seed(5)
    if tile is None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    else:
        with tiled(model, tile):
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("checkpointed", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("make", [tiny, gemma3], ids=["llama", "gemma3"])
def test_gradients_are_those_of_whole_rows(make, checkpointed):
    model, ids = make().double(), tokens(2, 23)
    wanted, found = gradients(model, ids), gradients(model, ids, 5, checkpointed)
    assert wanted.keys() == found.keys()
    for name, gradient in wanted.items():
        assert (found[name] - gradient).norm() <= 1e-6 * gradient.norm() + 1e-12, name


def test_adapters_are_tiled_and_base_weights_get_no_gradient():
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights="gaussian")
    model, ids = get_peft_model(tiny(), config).double(), tokens(2, 23)
    assert sum(hasattr(module, "base_layer") for module in tiled_modules(model)) == 6
    wanted, found = gradients(model, ids), gradients(model, ids, 5, checkpointed=True)
    assert wanted.keys() == found.keys() and all("lora_" in name for name in wanted)
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-6, atol=1e-9)


def test_a_checkpointed_layer_runs_each_tile_twice_in_all():
    model, ids, calls = tiny().train(), tokens(1, 20), []
    model.gradient_checkpointing_enable({"use_reentrant": False})
    mlp = model.model.layers[1].mlp
    mlp.gate_proj.register_forward_hook(lambda *_: calls.append(1))
    with tiled(model, 5):
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert len(calls) == 2 * 4  # in forward and in backward; the checkpoint's recompute ends before
    assert "forward" not in vars(mlp)


class DroppingMLP(nn.Module):
    """A feed-forward layer with dropout."""

    def __init__(self):
        super().__init__()
        self.up, self.drop = nn.Linear(32, 32), nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(self.up(x))


def test_backward_drops_what_forward_dropped():
    model = tiny()
    mlp = model.model.layers[0].mlp = DroppingMLP()
    model = model.double().train()
    x = torch.randn(2, 20, 32, dtype=torch.float64, requires_grad=True)
    with tiled(model, 5):
        out = mlp(x)
        kept = out.detach() != 0
        torch.rand(3)  # draws between forward and backward
        before = torch.get_rng_state()
        (grad,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(grad, 2 * kept.double() @ mlp.up.weight.detach())
    assert torch.equal(torch.get_rng_state(), before)
    assert 0.3 < kept.double().mean() < 0.7


def test_weights_of_16_bits_are_summed_in_float32():
    model = tiny().bfloat16().train()
    mlp = model.model.layers[0].mlp
    x = torch.randn(1, 512, 32).bfloat16()
    with tiled(model, 2):
        (tile_grad,) = torch.autograd.grad(mlp(x).float().sum(), mlp.down_proj.weight)
    (whole,) = torch.autograd.grad(mlp(x).float().sum(), mlp.down_proj.weight)
    exact = copy.deepcopy(mlp).double()
    (wanted,) = torch.autograd.grad(exact(x.double()).sum(), exact.down_proj.weight)
    error, of_whole = ((g.double() - wanted).norm() / wanted.norm() for g in (tile_grad, whole))
    assert error < 2 * of_whole + 1e-3
