"""A small tokenizer that puts special tokens around a text, as Llama's and Gemma's do."""

from tokenizers import processors

from .training import tokenizer

BOS, EOS = 1, 2


def framing(template: str = "<bos> $A"):
    """The word-level tokenizer with a template of special tokens: "$A", "<bos> $A", "<bos> $A <eos>", "$A <eos>"."""
    made = tokenizer()
    if template != "$A":
        made.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=[("<bos>", BOS), ("<eos>", EOS)]
        )
    return made
