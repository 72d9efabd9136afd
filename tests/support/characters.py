"""A tokenizer of one token a character, so that any text works and lengths can be counted by eye."""

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

CHARACTERS = 130


def character_tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": 0, "<bos>": 1, "<eos>": 2, "<unk>": 3, **{chr(c): c for c in range(4, 127)}}
    core = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )


def spaced_tokenizer() -> PreTrainedTokenizerFast:
    """The same of Llama 2's kind: it puts a space before all that it is given, and writes spaces as "▁"."""
    words = {"<pad>": 0, "<bos>": 1, "<eos>": 2, "<unk>": 3, "▁": 32}
    words |= {chr(c): c for c in range(4, 127) if chr(c) != " "}
    core = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )


def beginning_tokenizer() -> PreTrainedTokenizerFast:
    """The same with a token that it puts before every text, as Gemma's does."""
    return framed(character_tokenizer(), "<bos> $A")


def framed(tokenizer: PreTrainedTokenizerFast, template: str) -> PreTrainedTokenizerFast:
    """`tokenizer`, which puts special tokens around a text from now on: "<bos> $A", "<bos> $A <eos>", "$A <eos>"."""
    names = {"<bos>": tokenizer.bos_token_id, "<eos>": tokenizer.eos_token_id}
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=list(names.items())
    )
    return tokenizer


def chat_tokenizer() -> PreTrainedTokenizerFast:
    """The same of an instruct model, with a chat template."""
    tokenizer = character_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</s>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    return tokenizer
