"""What a layer keeps, counted; test_plan.py has steps that an H200 measured."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.shapes import size
from transformers import AutoConfig, AutoModelForCausalLM

from rope_patch.rope.rotary import find_decoder
from trl_ext.engines.sharding import Sharding
from trl_ext.memory.size import ModelSize
from trl_ext.memory.step import Step, peak_memory, saved_of_layer

N_TOKENS, RANK = 250, 8  # a number of tokens that is no weight's, which tells saved activations from casts


@pytest.mark.parametrize("train", ["all", "qkv", "lora", "lora of all matrices"])
@pytest.mark.parametrize(
    ("model_type", "dtype", "autocast"),
    [
        ("llama", torch.float32, False), ("qwen3", torch.float32, True),
        ("gemma3_text", torch.bfloat16, True), ("gemma3_text", torch.float32, True),
    ],
)  # fmt: skip
def test_a_layer_keeps_what_pytorch_saves_for_its_backward(model_type, dtype, autocast, train):
    """Counted on a CPU with hooks; the arithmetic leaves out sums over features, a few numbers a token."""
    shape = {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 8, "num_key_value_heads": 2}
    config = AutoConfig.for_model(
        model_type, **shape, head_dim=32, vocab_size=64, num_hidden_layers=2, layer_types=["full_attention"] * 2
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=dtype)
    sizes = ModelSize.of(model)
    train, adapts_mlp = train.split()[0], "matrices" in train
    if train == "lora":
        names = ["q_proj", "k_proj", "v_proj", "o_proj", *["gate_proj", "up_proj", "down_proj"] * adapts_mlp]
        model = get_peft_model(model, LoraConfig(r=RANK, target_modules=names), autocast_adapter_dtype=True)
    elif train == "qkv":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(any(part in name for part in ("q_proj", "k_proj", "v_proj")))
    counted = saved_bytes(model, 2, autocast) - saved_bytes(model, 1, autocast)
    step = Step(train, RANK, N_TOKENS, autocast, False, False, weight_bytes=dtype.itemsize, adapts_mlp=adapts_mlp)
    expected = saved_of_layer(sizes, step)
    few = 4 * 2 * (8 + 2 + 2 * sizes.norms)
    if model_type == "gemma3_text" and train == "all" and autocast:  # its norms stay in float32 to their end
        few += 2 * sizes.normed + (2 * sizes.norms * sizes.hidden if dtype == torch.bfloat16 else 0)
    assert expected <= counted / N_TOKENS <= expected + few


def saved_bytes(model, n_layers, autocast):
    """Bytes of all activations that a forward through the first layers saves."""
    decoder, saved = find_decoder(model), {}
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights and tensor.numel() >= N_TOKENS and N_TOKENS in tensor.shape:
            saved[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    layers, decoder.layers, decoder.config.num_hidden_layers = decoder.layers, decoder.layers[:n_layers], n_layers
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
    ):
        decoder(input_ids=torch.arange(N_TOKENS)[None] % 64, use_cache=False)
    decoder.layers, decoder.config.num_hidden_layers = layers, len(layers)
    return sum(n_bytes for n_bytes, _ in saved.values())


def test_masks_stay_while_the_loss_is_formed():
    """An H200 took 12.3 GiB for this step with masks (research/results/speed.md); its loss is larger than a layer."""
    memory = peak_memory(size("gemma3-270m"), Step("all", 0, 32768, True, True, True, attention="masks"))
    assert memory.loss > memory.layer and memory.total / 2**30 == pytest.approx(12.3, rel=0.01)


def test_a_teacher_costs_a_copy_of_the_weights_unless_adapters_are_trained():
    def teacher(train):
        return peak_memory(size("smollm2-135m"), Step(train, 8, 1024, True, True, True)).teacher

    assert teacher("all") == teacher("qkv") == 4 * 134_515_008 and teacher("lora") == 0


def test_an_engine_splits_the_copy_that_teaches_and_has_two_layers_of_it_whole():
    memory = peak_memory(size("llama-3-8b"), Step("all", 0, 1024, True, True, True), Sharding.of_config("fsdp2", 4))
    in_layers, outside = 6_979_588_096, 2 * 128256 * 4096
    assert memory.teacher == in_layers + outside + 2 * (outside + 2 * in_layers // 32)


def test_autocast_copies_adapters_and_no_weights_of_16_bits():
    step = Step("lora", 64, 1024, True, True, True, weight_bytes=2)
    a_layer = 2 * (4096 + 4096) + 2 * (4096 + 1024)  # of q and o, and of k and v
    assert peak_memory(size("llama-3-8b"), step).casts == 2 * 64 * 32 * a_layer
