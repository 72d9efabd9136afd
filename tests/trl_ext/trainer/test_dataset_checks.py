"""Datasets that TRL would misread, or end with a traceback on, are refused before training."""

import pytest
from datasets import Dataset
from support.tiny import VOCAB, tiny
from support.training import documents, tokenizer, trainer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from trl_ext import RopeSFTConfig
from trl_ext.trainer.dataset_checks import require_known_tokens, require_text

USER, REPLY = {"role": "user", "content": "w5"}, {"role": "assistant", "content": "w6"}
GOOD = [USER, REPLY]
CHATS = "must have in 'messages' a list of messages with a role and content"
PAIRS = "must have in 'prompt' and 'completion' texts, or lists of messages with a role and content"
INTEGERS = "must have a list of integers in "
NO_STRING = "must have a string in 'text', got "
NO_TEXT = "must have a text in every row: 1 of 3 rows have no 'text', or null"
MALFORMED = {
    "no-text": ([{"story": "w3 w4 w5"}] * 4, "must have a column 'text', .*, got story. Set dataset_text_"),
    "null-text": ([{"text": "w3 w4 w5"}, {"text": None}, {"text": "w3"}], NO_TEXT),
    "text-elsewhere": ([{"text": "w3 w4 w5"}, {"story": "w3"}, {"text": "w3"}], NO_TEXT),
    "number": ([{"text": 5}] * 4, NO_STRING + "int64. Set dataset_text_"),
    "list": ([{"text": ["w3", "w4"]}] * 4, NO_STRING + "List.*string.*. Set dataset_text_"),
    "object": ([{"text": {"en": "w3"}}] * 4, NO_STRING + ".*'en'.*. Set dataset_text_"),
    "no-role": ([{"messages": [{"content": "w5"}]}], "row 0 " + CHATS),
    "null-role": ([{"messages": GOOD}, {"messages": [{**USER, "role": None}]}], "row 1 " + CHATS),
    "no-messages": ([{"messages": GOOD}, {"messages": []}], "row 1 " + CHATS),
    "null": ([{"messages": None}, {"messages": GOOD}], "row 0 " + CHATS),
    "strings": ([{"messages": ["w5", "w6"]}], "row 0 " + CHATS),
    "string": ([{"messages": "w5 w6"}], "row 0 " + CHATS),
    "chats-and-texts": ([{"messages": GOOD, "text": None}, {"messages": None, "text": "w5"}], "row 1 " + CHATS),
    "texts-and-chats": ([{"messages": None, "text": "w5"}, {"messages": GOOD, "text": None}], "1 of 2 rows have no"),
    "conversations": ([{"conversations": [{"from": "human", "text": "w5"}]}], "row 0 must have in 'conversations'"),
    "prompt": ([{"prompt": "w5", "completion": "w6"}, {"prompt": None, "completion": "w6"}], "row 1 " + PAIRS),
    "completion": ([{"prompt": "w5", "completion": None}], "row 0 " + PAIRS),
    "text-behind-chat": ([{"prompt": [USER], "completion": "w6"}], "row 0 " + PAIRS),
    "empty-prompt": ([{"prompt": [USER], "completion": [REPLY]}, {"prompt": [], "completion": [REPLY]}], "row 1 "),
    "beyond": ([{"input_ids": [5, 6]}, {"input_ids": [5, VOCAB]}], f"row 1 .* has {VOCAB} in 'input_ids', and the"),
    "negative": ([{"input_ids": [5, -1, 6]}], "row 0 .* has -1 in 'input_ids', and the model knows tokens 0 to"),
    "floats": ([{"input_ids": [5.0, 6.0]}], INTEGERS + "'input_ids' of each row, got"),
    "words": ([{"input_ids": ["w5", "w6"]}], INTEGERS + "'input_ids' of each row, got"),
    "labels": ([{"input_ids": [5, 6], "labels": [-1, 6]}], "row 0 .* has -1 in 'labels', .* or -100 for none"),
    "float-labels": ([{"input_ids": [5, 6], "labels": [5.0, 6.0]}], INTEGERS + "'labels' of each row, got"),
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_malformed_rows_are_named(kind, tmp_path):
    rows, message = MALFORMED[kind]
    rows, args = Dataset.from_list(rows), RopeSFTConfig(str(tmp_path), use_cpu=True, bf16=False)
    with pytest.raises(ValueError, match=f"^train_dataset.*{message}"):
        require_text(rows, "train_dataset", args)
        require_known_tokens(rows, "train_dataset", VOCAB)


def test_the_trainer_looks_at_each_of_its_sets(tmp_path):
    rows = {kind: Dataset.from_list(MALFORMED[kind][0]) for kind in ("null-text", "beyond", "labels")}
    for kind in rows:
        with pytest.raises(ValueError, match=f"^train_dataset.*{MALFORMED[kind][1]}"):
            trainer(tmp_path, train_dataset=rows[kind])
        with pytest.raises(ValueError, match=rf"^eval_dataset\['b'\].*{MALFORMED[kind][1]}"):
            trainer(tmp_path, eval_dataset={"a": documents(2), "b": rows[kind]})


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path):
    made = tokenizer()
    made.add_tokens(["w500"])
    texts = Dataset.from_dict({"text": ["w5 w6", "w5 w500"]})
    with pytest.raises(ValueError, match=rf"row 1 .* has {VOCAB} in .* call model.resize_token_embeddings"):
        trainer(tmp_path, train_dataset=texts, processing_class=made)
    model = tiny()
    model.resize_token_embeddings(len(made))
    trainer(tmp_path, model=model, train_dataset=texts, processing_class=made)


def labelled(dataset):
    return dataset.add_column("labels", dataset["input_ids"])


AS_IT_IS = {"skip_prepare_dataset": True}


def test_rows_of_several_documents_that_would_not_be_kept_apart_are_refused(tmp_path):
    packed = trainer(tmp_path, packing=True).train_dataset
    for options in ({}, {"packing": True, "packing_strategy": "wrapped"}, {"dataset_kwargs": AS_IT_IS}):
        with pytest.raises(
            ValueError, match=r"rows of train_dataset hold several documents \(it has a column seq_len.*"
        ):
            trainer(tmp_path, train_dataset=packed, **options)
    with pytest.raises(ValueError, match=r"rows of eval_dataset\['a'\] hold several .* Set padding_free=True, or give"):
        trainer(tmp_path, eval_dataset={"a": packed}, dataset_kwargs=AS_IT_IS, train_dataset=labelled(documents(4)))
    with pytest.raises(ValueError, match=r"rows of eval_dataset hold several documents \(eval_packing=True\)"):
        trainer(tmp_path, eval_dataset=documents(4), eval_packing=True)
    with pytest.raises(ValueError, match="at most max_length=40 tokens, got one of .* Raise max_length"):
        trainer(tmp_path, train_dataset=packed, packing=True, max_length=40)
    collator = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    trainer(tmp_path, train_dataset=packed, data_collator=collator)
