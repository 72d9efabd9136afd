"""Every token of a training set is in a row, or told to be in none."""

import re
from collections import Counter

import pytest
from datasets import Dataset, IterableDataset
from hypothesis import given, settings
from hypothesis import strategies as st
from support.text import BOS, EOS, framing
from support.training import documents, logged, tokenizer, trainer
from trl import SFTTrainer

from trl_ext import RopeSFTConfig
from trl_ext.config import LONG_DOCUMENTS
from trl_ext.trainer.training_set import prepare_rows

TOLD = "trl_ext.trainer.training_set"


def words(n, first=3):
    return " ".join(f"w{3 + (first + i) % 90}" for i in range(n))


def rows_of(dataset, **options):
    """What `prepare_rows` makes of a dataset, without a model around it."""
    tokenizer = options.pop("tokenizer", None) or framing(options.pop("template", "<bos> $A"))
    common = {"output_dir": "unused", "use_cpu": True, "bf16": False, "report_to": [], **LONG_DOCUMENTS}
    args = RopeSFTConfig(**{**common, **options})
    stand_in = object.__new__(SFTTrainer)
    stand_in._tokenizer, stand_in.chat_template, stand_in.completion_only_loss = tokenizer, None, True

    def prepare(documents, args, packing):
        return SFTTrainer._prepare_dataset(stand_in, documents, tokenizer, args, packing, None, "train")

    return prepare_rows(dataset, "train_dataset", args, tokenizer, args.packing, prepare)


def documents_of(row):
    """The documents of a row, packed or not."""
    begin, documents = 0, []
    for n in row.get("seq_lengths") or [len(row["input_ids"])]:
        documents.append(row["input_ids"][begin : begin + n])
        begin += n
    return documents


@pytest.fixture(autouse=True)
def quiet():
    from datasets.utils.logging import disable_progress_bar

    disable_progress_bar()


@pytest.mark.parametrize(
    ("template", "rows"),
    [
        ("$A", [[*range(6, 16)], [*range(16, 26)], [26, 27, 28, 29, 30, EOS]]),
        ("<bos> $A", [[BOS, *range(6, 15)], [BOS, *range(15, 24)], [BOS, *range(24, 31), EOS]]),
        ("<bos> $A <eos>", [[BOS, *range(6, 15)], [BOS, *range(15, 24)], [BOS, *range(24, 31), EOS, EOS]]),
    ],
)
@pytest.mark.parametrize("packing", [False, True])
def test_a_long_text_gives_rows_that_each_begin_as_a_text(packing, template, rows, caplog):
    made = rows_of(Dataset.from_dict({"text": [words(25)]}), template=template, max_length=10, packing=packing)
    assert sorted(piece for row in made for piece in documents_of(row)) == sorted(rows)
    assert made["labels"] == made["input_ids"]
    n = sum(len(row) for row in rows) - 2 * (rows[0][0] == BOS)
    told = f"train_dataset: 1 document of {n} tokens in 3 {'packed ' * packing}rows of at most 10, 1 document longer"
    assert told in caplog.text and "Left out: nothing." in caplog.text


@pytest.mark.parametrize(("template", "last"), [("$A", [25, EOS]), ("<bos> $A", [BOS, 23, EOS])])
def test_no_row_holds_one_token_of_a_document(template, last):
    n = 20 if template == "$A" else 18
    made = rows_of(Dataset.from_dict({"text": [words(n)]}), template=template, max_length=10)
    assert list(map(len, made["input_ids"])) == [10, 9, len(last)] and made["input_ids"][-1] == last


def test_given_tokens_are_cut_with_their_own_labels_and_begin_as_they_do():
    ids, labels = [BOS, *range(10, 16)], [-100, *range(20, 26)]
    made = rows_of(Dataset.from_dict({"input_ids": [ids, ids[1:]], "labels": [labels, labels[1:]]}), max_length=4)
    assert made["input_ids"] == [[BOS, 10, 11, 12], [BOS, 13, 14, 15], [10, 11, 12, 13], [14, 15]]
    assert made["labels"] == [[-100, 20, 21, 22], [-100, 23, 24, 25], [20, 21, 22, 23], [24, 25]]


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"long_documents": "truncate"}, 20),
        ({"packing": True, "long_documents": "truncate"}, 20),
        ({"packing": True, "packing_strategy": "bfd_split", "long_documents": "truncate"}, 42),
        ({"packing": True, "packing_strategy": "wrapped"}, 42),
        ({"packing": True}, 42),
        ({}, 42),
    ],
    ids=["truncate", "bfd", "bfd_split", "wrapped", "split-packed", "split"],
)
def test_what_is_truncated_is_told(options, kept, caplog):
    made = rows_of(Dataset.from_dict({"text": [words(20)] * 2}), max_length=10, template="$A", **options)
    assert sum(map(len, made["input_ids"])) == kept
    lost = "22 tokens (52.4% of all) behind max_length in 2 documents" in caplog.text
    assert lost == (kept == 20) and ("Left out: nothing" in caplog.text) != lost


CHAT = [{"role": "user", "content": "w5 w6"}, {"role": "assistant", "content": words(9)}]
STAYS_WHOLE = {
    "messages": {"messages": [CHAT]},
    "completion": {"prompt": ["w5 w6"], "completion": [" " + words(11)]},
    "labels": {"input_ids": [[*range(5, 19)]], "labels": [[5, -100, *range(7, 19)]]},
    "mask": {"input_ids": [[*range(5, 19)]], "completion_mask": [[0, 0] + [1] * 12]},
}


@pytest.mark.parametrize("kind", STAYS_WHOLE)
def test_prompts_and_conversations_stay_whole_and_what_is_lost_is_told(kind, caplog):
    made = tokenizer()
    made.chat_template = "{% for m in messages %}w3 {{ m.content }} w4 {% endfor %}"
    data = Dataset.from_dict(STAYS_WHOLE[kind])
    (row,) = rows_of(data, tokenizer=made, max_length=8)
    assert len(row["input_ids"]) == 8
    n = {"messages": 15}.get(kind, 14)
    told = (
        f"Left out: {n - 8} tokens ({(n - 8) / n:.1%} of all) behind max_length in 1 document (documents with prompts, "
    )
    assert told in caplog.text
    rows = rows_of(data, tokenizer=made, max_length=8, packing=True)
    assert sum(map(len, rows["input_ids"])) == n and "whose later rows lack what came before" in caplog.text


def test_a_completion_behind_max_length_is_told(caplog):
    data = Dataset.from_dict({"prompt": [words(12), words(2)], "completion": [" w9", " w9"]})
    for way in ("split", "truncate"):
        caplog.clear()
        made = rows_of(data, max_length=8, template="$A", long_documents=way)
        assert made["input_ids"] == [[6, 7, 9, EOS]]
        assert "1 document of 14 tokens whose completion lies behind max_length" in caplog.text
    with pytest.raises(ValueError, match="max_length=8 truncates every token to predict in train_dataset"):
        rows_of(data.select([0]), max_length=8)


EMPTY = {
    "empty": {"text": ["", ""]},
    "one": {"input_ids": [[5], [6], []]},
    "masked": {"input_ids": [[5, 6], [7, 8]], "labels": [[5, -100], [-100, -100]]},
}


@pytest.mark.parametrize("template", ["$A", "<bos> $A", "<bos> $A <eos>"])
@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("kind", EMPTY)
def test_a_dataset_with_nothing_to_predict_is_refused(kind, packing, template):
    data = Dataset.from_dict(EMPTY[kind])
    for dataset in (data, data.to_iterable_dataset()):
        with pytest.raises(ValueError, match="train_dataset must have a document of at least two tokens with a label"):
            rows_of(dataset, packing=packing, template=template, max_length=8)


def test_some_documents_with_nothing_to_predict_are_left_out_and_told(caplog, tmp_path):
    data = Dataset.from_dict({"text": ["", words(5), "", words(3)]})
    for packing in (False, True):
        caplog.clear()
        run = trainer(
            tmp_path, train_dataset=data, eval_dataset=data, packing=packing, max_length=16, long_documents="split"
        )
        assert sum(map(len, run.train_dataset["input_ids"])) == sum(map(len, run.eval_dataset["input_ids"])) == 10
        for name in ("train_dataset", "eval_dataset"):
            assert f"{name}: 4 documents of 12 tokens in " in caplog.text
        assert caplog.text.count("Left out: 2 documents of 2 tokens without a token to predict") == 2


def test_a_set_that_trl_does_not_prepare_is_looked_at_too(caplog, tmp_path):
    as_it_is = {"dataset_kwargs": {"skip_prepare_dataset": True}}
    rows = [[5], [5, 6, 7], [8]]
    trainer(tmp_path, train_dataset=Dataset.from_dict({"input_ids": rows, "labels": rows}), **as_it_is)
    assert "train_dataset: 2 documents without a token to predict stay in it." in caplog.text
    rows = [[5], [6]]
    with pytest.raises(ValueError, match="train_dataset must have a document of at least two tokens"):
        trainer(tmp_path, train_dataset=Dataset.from_dict({"input_ids": rows, "labels": rows}), **as_it_is)


@pytest.mark.parametrize("packing", [False, True])
def test_a_stream_is_cut_too_and_says_that_it_is_not_counted(packing, caplog, tmp_path):
    data = Dataset.from_dict({"text": [words(25), "", words(4)], "id": [1, 2, 3]})
    stream = rows_of(data.to_iterable_dataset(), max_length=10, packing=packing)
    counted = rows_of(data, max_length=10, packing=packing)
    assert [row["input_ids"] for row in stream] == counted["input_ids"]
    assert "train_dataset is a stream, whose documents and tokens are not counted. Documents longer than" in caplog.text
    options = {"max_length": 10, "packing": packing, "max_steps": 1, "long_documents": "split"}
    run = trainer(tmp_path, train_dataset=data.to_iterable_dataset(), **options)
    run.train()
    assert len(logged(run, "loss")) == 1


PACKED = {"packing": True, "learning_rate": 0.0, "max_steps": 1, "per_device_train_batch_size": 7}


def test_rows_that_are_packed_already_keep_their_documents(tmp_path):
    first = trainer(tmp_path, train_dataset=documents(7), **PACKED)
    again = trainer(tmp_path, train_dataset=first.train_dataset, **PACKED)
    joined = trainer(
        tmp_path,
        train_dataset=first.train_dataset,
        **PACKED | {"packing": False, "padding_free": True, "max_length": None},
    )
    for run in (first, again, joined):
        assert run.train_dataset["seq_lengths"] == first.train_dataset["seq_lengths"]
        assert any(len(lengths) > 1 for lengths in run.train_dataset["seq_lengths"])
        run.train()
    losses = [logged(run, "loss")[0]["loss"] for run in (first, again, joined)]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)


def test_each_way_to_evaluate_packed_rows_gives_one_loss(tmp_path):
    held_out = documents(8, seed=3)
    run = trainer(tmp_path, packing=True, eval_dataset=held_out)
    loss = run.evaluate()["eval_loss"]
    assert run.evaluate(eval_dataset=held_out)["eval_loss"] == loss
    assert run.evaluate(eval_dataset=run.eval_dataset)["eval_loss"] == loss
    assert run.evaluate(eval_dataset={"a": held_out})["eval_a_loss"] == loss
    named = trainer(tmp_path, packing=True, eval_dataset={"a": held_out})
    assert named.evaluate()["eval_a_loss"] == loss


def test_max_length_leaves_room_beside_the_tokens_of_a_template():
    with pytest.raises(ValueError, match="max_length must leave room for a token to predict beside the 2 tokens"):
        rows_of(Dataset.from_dict({"text": [words(9)]}), template="<bos> <bos> $A", max_length=2)


LEFT_OUT = re.compile(
    r"([\d,]+) tokens? (?:\([\d.]+% of all\) )?(?:without|behind|in rows)|of ([\d,]+) tokens? without"
)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=8),
    max_length=st.integers(3, 14),
    way=st.sampled_from(
        [
            {"long_documents": "split"},
            {"long_documents": "truncate"},
            {"packing": True},
            {"packing": True, "packing_strategy": "wrapped"},
        ]
    ),
    begin=st.booleans(),
    end=st.booleans(),
    stream=st.booleans(),
)
def test_each_token_is_in_one_row_or_counted_as_left_out(lengths, max_length, way, begin, end, stream):
    # ids that name their place, so that a token that is lost or doubled shows
    begin_ids, end_ids = [BOS] * begin, [EOS] * end
    number = iter(range(10, 10_000))
    bodies = [[next(number) for _ in range(n)] for n in lengths]
    if way.get("long_documents") == "truncate":  # as TRL does, which keeps documents without a token to predict
        bodies = [body for body in bodies if body and begin + len(body) + end > 1] or [[next(number), next(number)]]
    given_rows = [[*begin_ids, *body, *end_ids] for body in bodies]
    data = Dataset.from_dict({"input_ids": given_rows}, features=None)
    wraps = way.get("packing_strategy") == "wrapped"
    teach = [bool(body) and (wraps or len(row) > 1) for body, row in zip(bodies, given_rows, strict=True)]
    options = {"template": f"{'<bos> ' * begin}$A", "max_length": max_length, **way}
    if not any(teach):
        with pytest.raises(ValueError, match="train_dataset must have a document"):
            rows_of(data, **options)
        return
    with pytest.MonkeyPatch.context() as patch:
        told = []
        patch.setattr("trl_ext.trainer.training_set.logger.warning", told.append)
        made = rows_of(data.to_iterable_dataset() if stream else data, **options)
    rows = [list(row["input_ids"]) for row in made]
    assert all(len(row) <= max_length for row in rows)
    seen = Counter(token for row in rows for token in row if token >= 10)
    every = [token for body in bodies for token in body]
    assert all(seen[token] <= 1 for token in every) and set(seen) <= set(every)
    pieces = [piece for row in made for piece in documents_of(row)]
    if not wraps:
        assert all(piece[: len(begin_ids)] == begin_ids for piece in pieces)
        assert all(len(piece) > 1 for piece in pieces), "each has a token to predict"
    (line,) = told
    if stream:
        assert "is a stream" in line
        return
    counted = sum(int((a or b).replace(",", "")) for a, b in LEFT_OUT.findall(line.partition("Left out: ")[2]))
    tokens = sum(map(len, given_rows))
    assert f"{len(bodies)} document{'s' * (len(bodies) != 1)} of {tokens} token{'s' * (tokens != 1)} in" in line
    repeated = sum(len(begin_ids) for piece in pieces) - len(begin_ids) * len(
        [body for body in bodies if body and seen[body[0]]]
    )
    if wraps:
        repeated = 0
        counted -= sum(len(row) == 1 for row in rows)  # they are in the rows, and told to teach nothing
    assert sum(map(len, rows)) - repeated + counted == tokens, line


MASKED = [{"input_ids": list(range(5, 15)), "completion_mask": [0] * 7 + [1] * 3}] * 4
STREAMS = {
    "dataset": lambda: Dataset.from_list(MASKED),
    "stream": lambda: Dataset.from_list(MASKED).to_iterable_dataset(),
    "mapped": lambda: Dataset.from_list(MASKED).to_iterable_dataset().map(lambda row: row),
    "generator": lambda: IterableDataset.from_generator(lambda: iter(MASKED)),
}


@pytest.mark.parametrize("kind", STREAMS)
def test_masked_rows_are_masked_in_a_stream_that_names_no_columns(kind, tmp_path):
    made = trainer(tmp_path, train_dataset=STREAMS[kind](), max_steps=1)
    assert made.args.completion_only_loss is True
    batch = next(iter(made.get_train_dataloader()))
    assert (batch["labels"][0] != -100).sum() == 3


def test_masked_rows_of_an_evaluation_are_masked_where_none_are_trained_on(tmp_path):
    rows = [{"input_ids": row["input_ids"]} for row in MASKED]
    sets = {"text": Dataset.from_list(rows), "questions": Dataset.from_list(MASKED)}
    made = trainer(tmp_path, train_dataset=Dataset.from_list(rows), eval_dataset=sets, max_steps=1)
    counted = {}
    for name, data in (("train", None), *sets.items()):
        batch = next(iter(made.get_train_dataloader() if data is None else made.get_eval_dataloader(name)))
        counted[name] = int((batch["labels"][0] != -100).sum())
    assert counted == {"train": 10, "text": 10, "questions": 3}
