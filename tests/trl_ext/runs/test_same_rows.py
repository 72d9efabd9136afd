"""A run is resumed on the rows that it was trained on, in their order, or not at all."""

import json

import pytest
from datasets import Dataset, IterableDataset
from support.training import documents, trainer

from rope_patch.model_card import RECORD_NAME
from trl_ext import RopeSFTConfig
from trl_ext.runs.same_rows import _HASHED, data_facts, require_same_data


def run_of(folder, rows=None, **options):
    options = {"per_device_train_batch_size": 2, "save_strategy": "steps", "save_steps": 1, **options}
    run = trainer(folder, **{"long_documents": "truncate", **options})
    if rows is not None:
        run.train_dataset = rows
    return run


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A checkpoint of one step, and its record; no test writes there."""
    folder = tmp_path_factory.mktemp("begun")
    run_of(folder, max_steps=1).train()
    return folder / "checkpoint-1", json.loads((folder / "checkpoint-1" / RECORD_NAME).read_text())


def recorded(folder, record):
    (folder / RECORD_NAME).write_text(json.dumps(record))
    return str(folder)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": documents(20)}, "has 24 training rows, and this run has 20"),
        ({"rows": documents(seed=1)}, "has training rows of other tokens than this run"),
        ({"max_length": 16}, "has training rows of other tokens than this run"),
        ({"seed": 7}, "in the order 'random, seed 42', and this run in 'random, seed 7'"),
        ({"data_seed": 7}, "in the order 'random, seed 42', and this run in 'random, seed 7'"),
        ({"train_sampling_strategy": "sequential"}, "this run in 'sequential'"),
    ],
    ids=["fewer", "other", "max_length", "seed", "data_seed", "sequential"],
)
def test_other_rows_are_not_resumed(options, message, begun, tmp_path):
    run = run_of(tmp_path, max_steps=2, **options)
    with pytest.raises(ValueError, match="or ignore_data_skip=True, which begins") as error:
        require_same_data(run.train_dataset, run.args, str(begun[0]))
    assert message in str(error.value)


def test_a_run_stops_before_its_first_step_unless_it_begins_with_the_first_row(begun, tmp_path):
    run = run_of(tmp_path, documents(20), max_steps=2)
    with pytest.raises(ValueError, match="has 24 training rows, and this run has 20"):
        run.train(resume_from_checkpoint=str(begun[0]))
    assert run.state.global_step == 0
    again = run_of(tmp_path, documents(20), max_steps=2, ignore_data_skip=True)
    again.train(resume_from_checkpoint=str(begun[0]))
    assert again.state.global_step == 2


def test_the_same_rows_go_on_and_what_only_one_record_has_is_not_compared(begun, tmp_path):
    run, record = run_of(tmp_path), begun[1]
    require_same_data(run.train_dataset, run.args, str(begun[0]))
    assert record["run"]["row_hashes"].pop("labels")  # as another version wrote it
    record["run"]["row_hashes"]["completion_mask"] = "0"
    require_same_data(run.train_dataset, run.args, recorded(tmp_path, record))
    for name in ("row_hashes", "order"):  # as an earlier version wrote it
        assert record["run"].pop(name)
    require_same_data(documents(20), run.args, recorded(tmp_path, record))


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
