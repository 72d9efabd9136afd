"""A run is resumed on the rows that it was trained on, in their order, or not at all."""

import json

import pytest
from datasets import Dataset, IterableDataset
from support.training import documents, trainer

from rope_patch.model_card import RECORD_NAME
from trl_ext import RopeSFTConfig
from trl_ext.runs.same_rows import _HASHED, data_facts


def run_of(folder, rows=None, **options):
    options = {"per_device_train_batch_size": 2, "save_strategy": "steps", "save_steps": 1, **options}
    run = trainer(folder, **options)
    if rows is not None:
        run.train_dataset = rows
    return run


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rows": documents(20)}, "has 24 training rows, and this run has 20"),
        ({"rows": documents(seed=1)}, "has training rows of other tokens than this run"),
        ({"max_length": 16}, "has training rows of other tokens than this run"),
        ({"seed": 7}, "in the order 'random, seed 0', and this run in 'random, seed 7'"),
        ({"data_seed": 7}, "in the order 'random, seed 0', and this run in 'random, seed 7'"),
        ({"train_sampling_strategy": "sequential"}, "this run in 'sequential'"),
    ],
    ids=["fewer", "other", "max_length", "seed", "data_seed", "sequential"],
)
def test_other_rows_are_not_resumed_but_from_the_first_one_on(options, said, tmp_path):
    before = {"seed": 0, "long_documents": "truncate"}
    run_of(tmp_path, max_steps=1, **before).train()
    run = run_of(tmp_path, max_steps=2, **{**before, **options})
    with pytest.raises(ValueError, match="or ignore_data_skip=True, which begins") as error:
        run.train(resume_from_checkpoint=True)
    assert said in str(error.value) and run.state.global_step == 0
    again = run_of(tmp_path, max_steps=2, ignore_data_skip=True, **{**before, **options})
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 2


def test_the_same_rows_go_on_and_so_do_those_of_which_nothing_is_recorded(tmp_path):
    run_of(tmp_path, max_steps=1).train()
    run_of(tmp_path, max_steps=2).train(resume_from_checkpoint=True)
    file = tmp_path / "checkpoint-2" / RECORD_NAME
    record = json.loads(file.read_text())
    for name in ("row_hashes", "order"):  # as an earlier version wrote it
        assert record["run"].pop(name)
    file.write_text(json.dumps(record))
    run_of(tmp_path, documents(20), max_steps=3).train(resume_from_checkpoint=True)


def test_columns_that_another_version_makes_besides_are_not_compared(tmp_path):
    run_of(tmp_path, max_steps=1).train()
    file = tmp_path / "checkpoint-1" / RECORD_NAME
    record = json.loads(file.read_text())
    assert record["run"]["row_hashes"].pop("labels")
    record["run"]["row_hashes"]["completion_mask"] = "0"
    file.write_text(json.dumps(record))
    run_of(tmp_path, max_steps=2).train(resume_from_checkpoint=True)


def test_every_token_and_mask_of_up_to_so_many_rows_counts_and_their_form_does_not(tmp_path):
    args = RopeSFTConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False)
    rows = [{"input_ids": [1, 2, 3], "completion_mask": [0, 1, 1]}, {"input_ids": [4], "completion_mask": [1]}] * 9
    whole = Dataset.from_list(rows)
    facts = data_facts(whole, args)
    for changed in (
        [*rows[:-1], {"input_ids": [5], "completion_mask": [1]}],
        [{"input_ids": [1, 2], "completion_mask": [0, 1]}, {"input_ids": [3, 4], "completion_mask": [1, 1]}, *rows[2:]],
        [{"input_ids": [1, 2, 3], "completion_mask": [0, 0, 1]}, *rows[1:]],
        [*rows[1:], rows[0]],
    ):
        assert data_facts(Dataset.from_list(changed), args)["row_hashes"] != facts["row_hashes"]
    shuffled = Dataset.from_list([*rows[9:], *rows[:9]]).select([*range(9, 18), *range(9)]).with_format("torch")
    assert data_facts(shuffled, args) == facts == data_facts(whole.select_columns(whole.column_names[::-1]), args)
    assert data_facts(IterableDataset.from_generator(lambda: iter(rows)), args) == {}
    assert data_facts(Dataset.from_dict({"text": ["a"]}), args) == {}
    many = Dataset.from_dict({"input_ids": [[i] for i in range(3 * _HASHED)]})
    first, last = (
        many.map(lambda _, i, at=at: {"input_ids": [-1 if i == at else i]}, with_indices=True)
        for at in (0, len(many) - 1)
    )
    assert len({str(data_facts(each, args)) for each in (many, first, last)}) == 3
    assert set(data_facts(Dataset.from_dict({"input_ids": []}), args)["row_hashes"]) == {"input_ids"}
    odd = [{"input_ids": [1], "labels": [[label]], "completion_mask": None} for label in (0.5, 1.5)]
    assert len({str(data_facts(Dataset.from_list([row]), args)) for row in odd}) == 2
