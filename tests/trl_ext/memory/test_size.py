"""Sizes of a model, against counts by hand, and with adapters or quantised."""

from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.shapes import size
from support.tiny import gemma3, tiny
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from trl_ext.memory.size import ModelSize


def test_parameters_are_counted_as_they_are_tied():
    assert size("smollm2-135m").parameters == 134_515_008
    assert size("llama-3-8b").parameters == 8_030_261_248


@pytest.mark.parametrize("targets", [["q_proj", "o_proj"], "all-linear"])
@pytest.mark.parametrize("make", [tiny, gemma3])
def test_adapters_are_no_part_of_the_sizes(make, targets):
    adapted = get_peft_model(make(), LoraConfig(r=4, target_modules=targets))
    assert ModelSize.of(adapted) == ModelSize.of(make())


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn])
def test_quantised_weights_count_in_bytes_and_not_as_numbers(dtype):
    model, plain = tiny(dtype=torch.bfloat16), ModelSize.of(tiny(dtype=torch.bfloat16))
    mlp = model.model.layers[0].mlp.down_proj
    numbers = mlp.weight.numel()
    mlp.weight = torch.nn.Parameter(torch.zeros(numbers // 2, 1).to(dtype), requires_grad=False)
    found = ModelSize.of(model)
    assert found == replace(
        plain,
        parameters=plain.parameters - numbers,
        in_layers=plain.in_layers - numbers,
        codes=plain.codes + numbers // 2,
        linears=plain.linears - numbers,
        decoded=numbers,
    )


def test_a_model_in_4_bits_is_counted_before_it_is_quantised(tmp_path):
    pytest.importorskip("bitsandbytes")
    tiny(hidden_size=256, intermediate_size=1024, head_dim=64, num_key_value_heads=2).save_pretrained(tmp_path)
    how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    found = ModelSize.of(AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=how))
    plain = ModelSize.of(AutoModelForCausalLM.from_pretrained(tmp_path))
    assert found == replace(plain.in_4_bits, qkv=0)
    assert found.codes - plain.codes == pytest.approx(plain.linears * 4.127 / 8, rel=1e-3), "QLoRA, section 3"
    assert found.decoded == 256 * 1024
