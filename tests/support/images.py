"""Tiny models that read images at positions with several axes, their processors, and conversations with a picture."""

import numpy as np
import transformers as hf
from datasets import Dataset, Image
from PIL import Image as Picture
from tokenizers import Tokenizer, models, pre_tokenizers

_SPECIAL = ["<pad>", "<eos>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ' ' }}{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ ' <eos> ' }}{% endfor %}"
)

MODELS = ("Qwen2VL", "Qwen2_5_VL", "Qwen3VL")


def tokenizer() -> hf.PreTrainedTokenizerFast:
    """Words, of which some stand for images."""
    words = [*_SPECIAL, "user", "assistant", *(f"w{i}" for i in range(60))]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = hf.PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")
    made.add_special_tokens({"additional_special_tokens": _SPECIAL[2:]})
    made.chat_template = _TEMPLATE
    return made


def processor(kind: str):
    """A processor of conversations without its part for videos, which needs torchvision."""

    class OfImages(getattr(hf, f"{kind}Processor")):
        def check_argument_for_proper_class(self, name, argument):
            return None if argument is None else super().check_argument_for_proper_class(name, argument)

    size = {"min_pixels": 56 * 56, "max_pixels": 56 * 56, "patch_size": 16 if kind == "Qwen3VL" else 14}
    return OfImages(hf.Qwen2VLImageProcessorPil(**size), tokenizer(), chat_template=_TEMPLATE)


def model(kind: str) -> hf.PreTrainedModel:
    """Random weights, the same in each call."""
    words = tokenizer()
    ids = {
        f"{name}_token_id": words.convert_tokens_to_ids(f"<|{token}|>")
        for name, token in (
            ("image", "image_pad"),
            ("video", "video_pad"),
            ("vision_start", "vision_start"),
            ("vision_end", "vision_end"),
        )
    }
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1]}
    text = {
        "vocab_size": len(words), "hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2,
        "num_hidden_layers": 2, "intermediate_size": 32, "rope_parameters": rope, "max_position_embeddings": 256,
        "bos_token_id": None, "eos_token_id": words.eos_token_id, "pad_token_id": words.pad_token_id,
    }  # fmt: skip
    vision = {"depth": 1, "num_heads": 4, "hidden_size": 16}
    if kind == "Qwen2VL":
        vision |= {"embed_dim": 16}
    else:
        vision |= {"out_hidden_size": 16, "intermediate_size": 32}
    if kind == "Qwen2_5_VL":
        vision |= {"fullatt_block_indexes": [0]}
    if kind == "Qwen3VL":
        text |= {"head_dim": 8, "rope_parameters": {**rope, "mrope_section": [2, 1, 1], "mrope_interleaved": True}}
        vision |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}
    hf.set_seed(0)
    config = getattr(hf, f"{kind}Config")(text_config=text, vision_config=vision, **ids)
    return getattr(hf, f"{kind}ForConditionalGeneration")(config)


def conversations(n: int = 4) -> Dataset:
    """Questions about a picture of noise, each of another length."""
    rng = np.random.default_rng(0)

    def one(i: int):
        question = [
            {"type": "image", "text": None},
            {"type": "text", "text": " " + " ".join(f"w{i + j}" for j in range(i + 3))},
        ]
        answer = [{"type": "text", "text": f"w{i} w{i + 5} w{i + 9}"}]
        return {
            "messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}],
            "images": [Picture.fromarray(rng.integers(0, 255, (32, 32, 3), dtype=np.uint8))],
        }

    return Dataset.from_list([one(i) for i in range(n)]).cast_column("images", [Image()])
