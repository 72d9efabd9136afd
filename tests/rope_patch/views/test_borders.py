"""Ends of sentences and of other parts, taken from a tokenizer, and training with gaps behind them."""

import pytest
import torch
from datasets import Dataset
from support.characters import CHARACTERS, character_tokenizer
from support.tiny import tiny
from support.training import logged, tokenizer, trainer

from rope_patch import rope_view
from rope_patch.patch import view_source
from rope_patch.views import Skip, border_tokens
from rope_patch.views.borders import sentence_ends
from trl_ext import RopeSFTConfig, RopeSFTTrainer

TEXT = "One is here. Two goes (as said!) there? Three.\nFour is 3 times nothing; and on it goes. "


def test_marks_and_line_breaks_end_sentences():
    made = character_tokenizer()
    assert {made.convert_ids_to_tokens(i) for i in sentence_ends(made)} == {".", "?", "!", "\n", "\r"}
    with pytest.raises(ValueError, match="this tokenizer has no token that ends a sentence"):
        sentence_ends(tokenizer())


@pytest.mark.parametrize("batch", [{}, {"packing": True, "max_length": 128}])
def test_the_trainer_takes_them_from_its_tokenizer(batch, tmp_path):
    data = Dataset.from_dict({"text": [TEXT[i:] for i in range(0, 40, 2)]})
    options = {"max_length": 100, "max_steps": 2, "learning_rate": 0.0, "per_device_train_batch_size": 3, **batch}
    made = character_tokenizer()
    model = tiny(vocab_size=CHARACTERS, max_position_embeddings=900)
    run = trainer(
        tmp_path, model=model, train_dataset=data, processing_class=made, view="longrecipe",
        view_args={"target": 900}, **options,
    )  # fmt: skip
    view = view_source(run.model).view
    run.train()
    assert set(view.sentence_ends) == set(sentence_ends(made)) == set(run.args.view_args["sentence_ends"])
    assert [entry["view/offset"] > 30 for entry in logged(run, "view")] == [True, True]


def test_the_callers_arguments_stay_for_a_trainer_with_another_tokenizer(tmp_path):
    args = RopeSFTConfig(
        output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to=[], view="longrecipe", view_args={"target": 900}
    )
    model, data = tiny(vocab_size=CHARACTERS, max_position_embeddings=900), Dataset.from_dict({"text": [TEXT]})
    run = RopeSFTTrainer(model, args, train_dataset=data, processing_class=character_tokenizer())
    assert "sentence_ends" in run.args.view_args and args.view_args == {"target": 900}


def test_blank_lines_end_paragraphs_and_the_end_of_sequence_a_document():
    made = character_tokenizer()
    newline, eos = made.convert_tokens_to_ids("\n"), made.eos_token_id
    assert border_tokens(made, "paragraph") == [[newline, newline]]
    assert border_tokens(made, "document") == [[eos]]
    made.add_tokens(["\n\n", ".\n \n", "\n\nA", "a\nb"])
    blank = [made.convert_tokens_to_ids(text) for text in ("\n\n", ".\n \n")]
    assert border_tokens(made, "paragraph") == [*([i] for i in blank), [newline, newline]]
    made.eos_token = None
    with pytest.raises(ValueError, match="no token that ends a document: give token IDs"):
        border_tokens(made, "document")


@pytest.mark.parametrize("objective", ["clm", "self-distill"])
def test_the_trainer_splits_behind_sentences(objective, tmp_path):
    data = Dataset.from_dict({"text": ["One. Twos"] * 6})
    run = trainer(
        tmp_path, model=tiny(vocab_size=CHARACTERS), train_dataset=data, processing_class=character_tokenizer(),
        view="skip", view_args={"split": "sentence"}, objective=objective, max_steps=2, learning_rate=0.0,
    )  # fmt: skip
    run.train()
    assert run.args.view_args["split"] == border_tokens(character_tokenizer(), "sentence")
    assert [entry["view/split"] for entry in logged(run, "view")] == [4.0, 4.0], "the only border is behind the mark"


def test_without_a_trainer_token_ids_are_needed():
    model, ids = tiny(), torch.zeros(1, 5, dtype=torch.int64)
    with rope_view(model, Skip(split="paragraph")), pytest.raises(ValueError, match="split='paragraph' needs a token"):
        model(ids)
