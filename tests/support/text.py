"""A small tokenizer that puts special tokens around a text, as Llama's and Gemma's do."""

from .characters import framed
from .training import tokenizer

BOS, EOS = 1, 2


def framing(template: str = "<bos> $A"):
    """The word-level tokenizer with a template of special tokens: "$A", "<bos> $A", "<bos> $A <eos>", "$A <eos>"."""
    return tokenizer() if template == "$A" else framed(tokenizer(), template)
