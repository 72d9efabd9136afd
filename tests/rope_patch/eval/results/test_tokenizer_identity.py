"""Which tokenizers count as one, and which do not; what a hash of one tells."""

from support.byte_tokenizer import as_transformers_5_17_reads_it
from support.characters import character_tokenizer, chat_tokenizer
from tokenizers import normalizers, pre_tokenizers
from transformers import PreTrainedTokenizer

from rope_patch.eval.results.tokenizer_identity import asks_alike, reads_alike, tokenizer_hash


def with_core(change):
    tokenizer = character_tokenizer()
    change(tokenizer.backend_tokenizer)
    return tokenizer


def test_tokenizers_that_make_the_same_tokens_read_alike():
    padding = character_tokenizer()
    padding.add_special_tokens({"pad_token": "[PAD]"})
    for other in (character_tokenizer(), chat_tokenizer(), padding):
        assert reads_alike(character_tokenizer(), other) and reads_alike(other, character_tokenizer())


def test_tokenizers_that_make_other_tokens_do_not():
    words = character_tokenizer()
    words.add_tokens(["dark"])
    others = [
        as_transformers_5_17_reads_it(),
        words,
        with_core(lambda core: setattr(core, "normalizer", normalizers.NFKC())),
        with_core(lambda core: setattr(core, "normalizer", normalizers.Lowercase())),
        with_core(lambda core: setattr(core, "pre_tokenizer", pre_tokenizers.Whitespace())),
    ]
    for other in others:
        assert not reads_alike(character_tokenizer(), other) and not reads_alike(other, character_tokenizer())


class Python(PreTrainedTokenizer):
    """A tokenizer without a core in Rust."""

    def __init__(self, words):
        self.words = words
        super().__init__()

    vocab_size = 2

    def get_vocab(self):
        return self.words


def test_the_hash_tells_tokenizers_apart_and_not_what_they_were_called_with():
    used = character_tokenizer()
    used(["a", "bc"], padding=True, truncation=True, max_length=5)
    assert tokenizer_hash(used) == tokenizer_hash(character_tokenizer())
    end = character_tokenizer()
    end.eos_token = "<unk>"
    others = [
        character_tokenizer(),
        end,
        with_core(lambda core: setattr(core, "normalizer", normalizers.Lowercase())),
        Python({"a": 0, "b": 1}),
        Python({"a": 1, "b": 0}),
    ]
    assert len({tokenizer_hash(tokenizer) for tokenizer in others}) == len(others)
    assert tokenizer_hash(Python({"a": 0, "b": 1})) == tokenizer_hash(Python({"b": 1, "a": 0}))


def test_chat_templates_are_compared_by_what_they_make():
    same, other = chat_tokenizer(), chat_tokenizer()
    same.chat_template = "{# a remark #}" + same.chat_template
    other.chat_template = other.chat_template.replace("<assistant>", "<model>")
    assert asks_alike(chat_tokenizer(), same) and asks_alike(character_tokenizer(), character_tokenizer())
    assert not asks_alike(chat_tokenizer(), other) and not asks_alike(chat_tokenizer(), character_tokenizer())
    turns = chat_tokenizer()
    turns.chat_template = turns.chat_template.replace("</s>", "{% if not loop.first %}</s>{% endif %}")
    assert not asks_alike(chat_tokenizer(), turns)
