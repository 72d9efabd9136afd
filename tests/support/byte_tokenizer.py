"""A tokenizer of bytes as Transformers 5.17 reads it from a GGUF file."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

START, END = "<|im_start|>", "<|im_end|>"


def as_transformers_5_17_reads_it():
    """A BPE of bytes with the parts that 5.17 adds, and the first token of a turn as the end of text."""
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    model = models.BPE(letters, [], unk_token="!", fuse_unk=True, byte_fallback=True)
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("\u2581", " "), decoders.ByteLevel()]
    )
    backend.add_special_tokens([START, END])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=START, eos_token=START)
