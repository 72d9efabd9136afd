"""The tokenizer of the embedded model, as some versions of Transformers read it from its GGUF file."""

import json
from pathlib import Path

from support.byte_tokenizer import END, START, as_transformers_5_17_reads_it
from transformers import AutoTokenizer, LlamaConfig

from trl_ext.demo import model as demo_model


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
