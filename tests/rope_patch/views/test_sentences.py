"""Ends of sentences, taken from a tokenizer, and training with gaps between sentences."""

import pytest
from datasets import Dataset
from support.characters import CHARACTERS, character_tokenizer
from support.tiny import tiny
from support.training import logged, tokenizer, trainer

from rope_patch.patch import view_source
from rope_patch.views.sentences import sentence_ends
from trl_ext import RopeSFTConfig, RopeSFTTrainer

TEXT = "One is here. Two goes (as said!) there? Three.\nFour is 3 times nothing; and on it goes. "


def test_marks_and_line_breaks_end_sentences():
    made = character_tokenizer()
    assert {made.convert_ids_to_tokens(i) for i in sentence_ends(made)} == {".", "?", "!", "\n", "\r"}
    with pytest.raises(ValueError, match="finds no token that ends a sentence in this tokenizer"):
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
