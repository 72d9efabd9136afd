"""Tiny random models that read images, under the names that TRL's tests load."""

from collections.abc import Callable
from typing import Any

import transformers as T
from transformers import PreTrainedModel, PreTrainedTokenizerFast, ProcessorMixin

from .tokenizer import Vocabulary

QWEN_TOKENS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
TOWER = {"hidden_size": 16, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 32}
QWEN_TOWER = {"hidden_size": 16, "num_heads": 4, "depth": 2}

Made = tuple[PreTrainedModel, ProcessorMixin]


def text(tokenizer: PreTrainedTokenizerFast, **own: Any) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        **{**TOWER, "num_key_value_heads": 2},
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        **own,
    }


def qwen(
    vocabulary: Vocabulary,
    family: str,
    template: str,
    processor_family: str,
    mrope_section: list[int],
    vision: dict[str, Any],
    patch_size: int = 14,
    **of_text: Any,
) -> Made:
    """A model with three axes of positions: `mrope_section` is how many of a head's frequencies each axis has."""
    tokenizer = vocabulary.tokenizer(template)
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": mrope_section, "mrope_interleaved": True}
    config = getattr(T, f"{family}Config")(
        text_config=text(tokenizer, rope_parameters=rope, **of_text),
        vision_config={**QWEN_TOWER, **vision},
        **{name: tokenizer.convert_tokens_to_ids(token) for name, token in QWEN_TOKENS.items()},
    )
    video = "Qwen2VL" if processor_family == "Qwen2_5_VL" else processor_family
    processor = getattr(T, f"{processor_family}Processor")(
        image_processor=T.Qwen2VLImageProcessor(min_pixels=56**2, max_pixels=4 * 56**2, patch_size=patch_size),
        tokenizer=tokenizer,
        video_processor=getattr(T, f"{video}VideoProcessor")(),
        chat_template=tokenizer.chat_template,
    )
    return getattr(T, f"{family}ForConditionalGeneration")(config), processor


def qwen2_vl(vocabulary: Vocabulary) -> Made:
    return qwen(vocabulary, "Qwen2VL", "qwen2_5_vl", "Qwen2VL", [1, 1], {"embed_dim": 64})


def qwen2_5_vl(vocabulary: Vocabulary) -> Made:
    vision = {"fullatt_block_indexes": [1], "out_hidden_size": 16, "intermediate_size": 32}
    return qwen(vocabulary, "Qwen2_5_VL", "qwen2_5_vl", "Qwen2_5_VL", [1, 1], vision)


def qwen3_vl(vocabulary: Vocabulary) -> Made:
    vision = {
        **{"out_hidden_size": 16, "intermediate_size": 32},
        **{"deepstack_visual_indexes": [1], "num_position_embeddings": 64},
    }
    return qwen(vocabulary, "Qwen3VL", "qwen3_vl", "Qwen3VL", [2, 1, 1], vision, patch_size=16, head_dim=8)


def qwen3_5(vocabulary: Vocabulary, family: str = "Qwen3_5", template: str = "qwen3_5_nothink", **of_text: Any) -> Made:
    vision = {"out_hidden_size": 16, "intermediate_size": 32, "num_position_embeddings": 64}
    of_text = {"layer_types": ["linear_attention", "full_attention"], "head_dim": 32, **of_text}  # 8 of 32 are rotated
    return qwen(vocabulary, family, template, "Qwen3VL", [2, 1, 1], vision, patch_size=16, **of_text)


def qwen3_5_moe(vocabulary: Vocabulary) -> Made:
    experts = {"num_experts": 4, "num_experts_per_tok": 2}
    experts |= {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
    return qwen3_5(vocabulary, "Qwen3_5Moe", "qwen3_6", **experts)


def gemma3(vocabulary: Vocabulary) -> Made:
    image_tokens = 16
    named = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    tokenizer = vocabulary.tokenizer("gemma3", eos="<eos>", pad="<pad>", bos="<bos>", extra_special_tokens=named)
    layers = {"head_dim": 8, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
    config = T.Gemma3Config(
        text_config=text(tokenizer, **layers),
        vision_config={**TOWER, "image_size": 56, "patch_size": 14, "vision_use_head": False},
        mm_tokens_per_image=image_tokens,
        image_token_index=tokenizer.image_token_id,
        boi_token_index=tokenizer.boi_token_id,
        eoi_token_index=tokenizer.eoi_token_id,
    )
    processor = T.Gemma3Processor(
        image_processor=T.Gemma3ImageProcessor(size={"height": 56, "width": 56}),
        tokenizer=tokenizer,
        image_seq_length=image_tokens,
        chat_template=tokenizer.chat_template,
    )
    return T.Gemma3ForConditionalGeneration(config), processor


def gemma4(vocabulary: Vocabulary) -> Made:
    image_tokens = 70  # the fewest that its image processor takes
    named = {"boi_token": "<|image>", "eoi_token": "<image|>", "image_token": "<|image|>"}
    named |= {"boa_token": "<|audio>", "eoa_token": "<audio|>", "audio_token": "<|audio|>"}
    tokenizer = vocabulary.tokenizer("gemma4", eos="<eos>", pad="<pad>", bos="<bos>", extra_special_tokens=named)
    layers = {
        **{"head_dim": 8, "global_head_dim": 8, "layer_types": ["sliding_attention", "full_attention"]},
        **{"sliding_window": 16, "num_kv_shared_layers": 0},
        **{"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": len(tokenizer)},
    }
    patches = 9 * image_tokens
    config = T.Gemma4Config(
        text_config=text(tokenizer, **layers),
        vision_config={
            **{**TOWER, "num_key_value_heads": 2, "head_dim": 4},
            **{"position_embedding_size": patches, "default_output_length": image_tokens},
        },
        audio_config=None,
        image_token_id=tokenizer.image_token_id,
        boi_token_id=tokenizer.boi_token_id,
        eoi_token_id=tokenizer.eoi_token_id,
        audio_token_id=tokenizer.audio_token_id,
        video_token_id=tokenizer.convert_tokens_to_ids("<|video|>"),
    )
    processor = T.Gemma4Processor(
        feature_extractor=T.Gemma4AudioFeatureExtractor(),
        image_processor=T.Gemma4ImageProcessor(image_seq_length=image_tokens, max_soft_tokens=image_tokens),
        tokenizer=tokenizer,
        video_processor=T.Gemma4VideoProcessor(),
        image_seq_length=image_tokens,
        chat_template=tokenizer.chat_template,
    )
    return T.Gemma4ForConditionalGeneration(config), processor


def llava(vocabulary: Vocabulary, family: str = "Llava") -> Made:
    tokenizer = vocabulary.tokenizer("llava_next", eos="</s>", pad="<pad>", bos="<s>")
    image_token = "<image>"
    config = getattr(T, f"{family}Config")(
        text_config={"model_type": "llama", **text(tokenizer)},
        vision_config={"model_type": "clip_vision_model", **TOWER, "image_size": 28, "patch_size": 14},
        image_token_index=tokenizer.convert_tokens_to_ids(image_token),
        image_seq_length=4,
        **({"image_grid_pinpoints": [[28, 56], [56, 28]]} if family == "LlavaNext" else {}),
    )
    sizes = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
    image_processor = (
        T.LlavaNextImageProcessor(**sizes, image_grid_pinpoints=[[28, 56], [56, 28]])
        if family == "LlavaNext"
        else T.CLIPImageProcessor(**sizes)
    )
    processor = getattr(T, f"{family}Processor")(
        image_processor=image_processor,
        tokenizer=tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        chat_template=tokenizer.chat_template,
        image_token=image_token,
        num_additional_image_tokens=1,
    )
    return getattr(T, f"{family}ForConditionalGeneration")(config), processor


def llava_next(vocabulary: Vocabulary) -> Made:
    return llava(vocabulary, "LlavaNext")


STAND_INS: dict[str, Callable[[Vocabulary], Made]] = {
    "tiny-Gemma3ForConditionalGeneration": gemma3,
    "tiny-Gemma4ForConditionalGeneration": gemma4,
    "tiny-LlavaForConditionalGeneration": llava,
    "tiny-LlavaNextForConditionalGeneration": llava_next,
    "tiny-Qwen2VLForConditionalGeneration": qwen2_vl,
    "tiny-Qwen2_5_VLForConditionalGeneration": qwen2_5_vl,
    "tiny-Qwen3VLForConditionalGeneration": qwen3_vl,
    "tiny-Qwen3_5ForConditionalGeneration-NoThink": qwen3_5,
    "tiny-Qwen3_5MoeForConditionalGeneration-3.6": qwen3_5_moe,
}
