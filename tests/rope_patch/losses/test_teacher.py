"""A teacher is the model that was loaded: what would make it another is refused when it is made."""

import pytest
import torch
from peft import (
    LoraConfig,
    MultitaskPromptTuningConfig,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    get_peft_model,
)
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from support.marks import needs_own_adapters
from support.tiny import WINDOW, tiny, tokens
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.integrations.neftune import activate_neftune, deactivate_neftune

from rope_patch import patch_model
from rope_patch.losses import (
    REQUEST,
    CopiedTeacher,
    HiddenDistiller,
    HiddenTargets,
    LongCE,
    RelationDistiller,
    RelationTargets,
    SelfDistiller,
    SharedTeacher,
    ViewConsistency,
    WeightedNextToken,
)

IDS = tokens(2, 20)
LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
# what the sizes of a tiny model ask for
OPTIONS = {
    "ADALORA": {"total_step": 10},
    "C3A": {"block_size": 8},
    "FOURIERFT": {"n_frequency": 10},
    "WAVEFT": {"n_frequency": 10},
    "ROAD": {"group_size": 8},
    "VBLORA": {"vector_length": 8, "num_vectors": 4},
    "IA3": {"feedforward_modules": []},
    "OFT": {"r": 0, "oft_block_size": 4},
    "ADAPTION_PROMPT": {"adapter_layers": 2, "adapter_len": 4, "target_modules": "self_attn"},
}


def kinds():
    """Every config that PEFT has for a model by itself, with options that a tiny model takes."""
    for name, config in sorted((str(kind.value), config) for kind, config in PEFT_TYPE_TO_CONFIG_MAPPING.items()):
        known = config.__dataclass_fields__
        sizes = {"target_modules": ["q_proj", "v_proj"], "r": 4, "num_virtual_tokens": 3}
        options = {n: value for n, value in sizes.items() if n in known} | OPTIONS.get(name, {})
        if name not in ("XLORA", "MIXED"):  # of other adapters
            yield pytest.param(lambda c=config, o=options: c(task_type="CAUSAL_LM", **o), id=name)


def states(decoder):
    with torch.no_grad():
        return decoder(IDS, use_cache=False).last_hidden_state


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("config", list(kinds()))
def test_a_shared_teacher_is_the_model_without_its_adapters_or_is_refused(config):
    """Whatever the adapters have become in training."""
    torch.manual_seed(1)
    model = get_peft_model(tiny(), config()).eval()
    try:
        teacher = SharedTeacher(model)
    except ValueError:
        return
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn_like(parameter)
    with teacher.ready() as decoder:
        assert torch.equal(states(decoder), states(tiny().model))


@pytest.mark.parametrize("init", ["pissa_niter_4", "olora"])
def test_adapters_that_change_the_base_weights_are_refused(init):
    model = get_peft_model(tiny(), LoraConfig(**LORA, init_lora_weights=init))
    with torch.no_grad(), model.disable_adapter():
        assert (model(IDS).logits - tiny()(IDS).logits).abs().max() > 0.1, "why"
    with pytest.raises(ValueError, match=f"init_lora_weights='{init}' changes the base weights"):
        SharedTeacher(model)


@pytest.mark.parametrize("init", ["corda", "loftq", "lora_ga"])
def test_so_are_those_that_need_data_or_quantised_weights(init):
    model = get_peft_model(tiny(), LoraConfig(**LORA))
    model.peft_config["default"].init_lora_weights = init
    with pytest.raises(ValueError, match=f"init_lora_weights='{init}' changes the base weights"):
        SharedTeacher(model)


@pytest.mark.parametrize("init", [True, False, "gaussian", "mica"])
def test_those_that_leave_them_are_taken(init):
    with SharedTeacher(get_peft_model(tiny(), LoraConfig(**LORA, init_lora_weights=init))).ready() as decoder:
        assert torch.equal(states(decoder), states(tiny().model))


def test_a_shared_teacher_has_no_dropout_and_its_student_keeps_it():
    model = get_peft_model(tiny(attention_dropout=0.5), LoraConfig(**LORA, lora_dropout=0.5)).train()
    with SharedTeacher(model).ready() as decoder:
        assert torch.equal(states(decoder), states(tiny().model))
    assert all(module.training for module in model.modules())


def test_merged_adapters_are_refused_at_once():
    model = get_peft_model(tiny(), LoraConfig(**LORA, init_lora_weights=False))
    model.merge_adapter()
    with pytest.raises(ValueError, match="call unmerge_adapter first"):
        SharedTeacher(model)
    model.unmerge_adapter()
    SharedTeacher(model)


@needs_own_adapters
def test_a_copy_of_a_model_with_adapters_is_no_teacher():
    model = tiny()
    model.add_adapter(LoraConfig(**LORA, init_lora_weights=False))
    with pytest.raises(ValueError, match="a copy of a model with adapters is not the pretrained model"):
        CopiedTeacher(model)
    with SharedTeacher(model).ready() as decoder:
        assert torch.equal(states(decoder), states(tiny().model))


@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_base_biases_that_are_trained_are_refused(bias):
    model = get_peft_model(tiny("qwen2"), LoraConfig(**LORA, bias=bias))
    with pytest.raises(ValueError, match="base_layer.bias and [0-9]+ more are trained too: freeze .* bias='none'"):
        SharedTeacher(model)


def test_adapters_on_both_weights_of_experts_are_taken():
    """PEFT wraps the wrapper of one weight in that of the other."""

    def experts():
        torch.manual_seed(0)
        sizes = {"vocab_size": 101, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
        sizes |= {"num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes)).eval()

    plain = states(experts().model)
    weights = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    model = get_peft_model(experts(), LoraConfig(target_parameters=weights, init_lora_weights=False)).eval()
    teacher = SharedTeacher(model)
    assert (states(model.base_model.model.model) - plain).abs().max() > 1e-2 * plain.std()
    with teacher.ready() as decoder:
        assert torch.equal(states(decoder), plain)
    next(p for n, p in model.named_parameters() if n.endswith("base_layer.gate_up_proj")).requires_grad_(True)
    with pytest.raises(ValueError, match="base_layer.gate_up_proj and 0 more are trained too"):
        SharedTeacher(model)


PROMPTS = {
    "PROMPT_TUNING": PromptTuningConfig,
    "PREFIX_TUNING": PrefixTuningConfig,
    "P_TUNING": PromptEncoderConfig,
    "MULTITASK_PROMPT_TUNING": MultitaskPromptTuningConfig,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", PROMPTS)
def test_prompts_are_refused_by_every_loss(kind):
    config = PROMPTS[kind](task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = patch_model(get_peft_model(tiny(), config), "skip")
    for make in (
        lambda: WeightedNextToken(model, LongCE()),
        lambda: SelfDistiller(model, ViewConsistency()),
        lambda: HiddenDistiller(model, HiddenTargets(), CopiedTeacher(tiny())),
        lambda: RelationDistiller(model, RelationTargets(), CopiedTeacher(tiny())),
    ):
        with pytest.raises(ValueError, match=f"adapter 'default' learns prompts .{kind}."):
            make()


def test_noised_embeddings_are_refused():
    model = patch_model(tiny(), "skip")
    handle = activate_neftune(model, 5.0)
    with pytest.raises(ValueError, match="NEFTune, neftune_noise_alpha=5.0"):
        SelfDistiller(model, ViewConsistency())
    deactivate_neftune(model, handle)
    SelfDistiller(model, ViewConsistency())


def reader_of_images():
    """A family that hands what its decoder is given to its encoder of images too; one token 100 stands for an image."""
    torch.manual_seed(0)
    text = {
        "vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": WINDOW,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
    }  # fmt: skip
    vision = {"depth": 2, "embed_dim": 16, "num_heads": 2, "hidden_size": 32, "patch_size": 4, "mlp_ratio": 2}
    config = Qwen2VLConfig(text_config=text, vision_config=vision, image_token_id=100, vision_start_token_id=99)
    return Qwen2VLForConditionalGeneration(config).eval()


@pytest.mark.parametrize("layers", [None, (1,)])
def test_relations_of_a_model_that_reads_images_are_those_of_its_text_layers(layers):
    model = patch_model(reader_of_images(), "pi", factor=2.0)
    ids = tokens(1, WINDOW // 2).clamp(max=98)
    ids[0, 2], ids[0, 3] = 99, 100
    grid, pixels = torch.tensor([[1, 2, 2]]), torch.randn(4, 3 * 2 * 4 * 4)
    with torch.no_grad():
        embeds = model.get_input_embeddings()(ids)
        embeds[0, 3] = model.get_image_features(pixels, grid).pooler_output[0]
    positions = torch.arange(WINDOW // 2).expand(3, 1, -1)  # an image of one token moves nothing
    losses = {}
    for name, inputs in {
        "images": {"input_ids": ids, "pixel_values": pixels, "image_grid_thw": grid},
        "embeds": {"inputs_embeds": embeds},
    }.items():
        distiller = RelationDistiller(model, RelationTargets(layers=layers), CopiedTeacher(model))
        request = distiller.request(ids)
        with distiller.active():
            model(**inputs, position_ids=positions, use_cache=False, **{REQUEST: request})
        assert sorted(request.sums) == ([0, 1, 2] if layers is None else [1])
        losses[name] = torch.stack([request.loss(target) for target in distiller.targets.weights])
    assert losses["images"].max() > 1e-4
    torch.testing.assert_close(losses["images"], losses["embeds"])
