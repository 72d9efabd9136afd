"""The tokenizer of the embedded model, as some versions of Transformers read it from its GGUF file."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast

from trl_ext.demo import model as demo_model

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


def test_it_is_a_bpe_of_bytes_that_ends_texts_as_the_model_does(monkeypatch, tmp_path):
    read = as_transformers_5_17_reads_it()
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *args, **options: read)
    ids = read("Hé, 你好", add_special_tokens=False)["input_ids"]
    end = read.convert_tokens_to_ids(END)
    config = LlamaConfig(bos_token_id=read.bos_token_id, eos_token_id=end, pad_token_id=end)
    demo_model._tokenizer(Path("model.gguf"), config).save_pretrained(tmp_path)
    monkeypatch.undo()
    written = AutoTokenizer.from_pretrained(tmp_path)
    assert (written.bos_token, written.eos_token, written.pad_token) == (START, END, END)
    assert written("Hé, 你好", add_special_tokens=False)["input_ids"] == ids
    assert written.decode(ids) == "Hé, 你好"
    file = json.loads((tmp_path / "tokenizer.json").read_text())
    assert file["decoder"]["type"] == "ByteLevel"
    assert not file["model"]["byte_fallback"] and not file["model"]["fuse_unk"]
