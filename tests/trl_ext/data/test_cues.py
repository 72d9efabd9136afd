"""Cues at the end of documents: as many tokens behind each, nothing lost, far positions in training."""

import re

import pytest
import torch
from datasets import Dataset, Features, List, Value
from support.text import BOS, EOS, framing
from support.tiny import tiny
from support.training import logged, tokenizer, trainer
from tokenizers import AddedToken

from rope_patch import rope_view
from rope_patch.layout.labelled import Labelled
from rope_patch.losses import CueWeight
from rope_patch.patch import view_source
from trl_ext import RopeSFTConfig, RopeSFTTrainer, append_cue
from trl_ext.data.cues import CUES, cue_ids

TEMPLATE = "{% for m in messages %}w3 {{ m.content }} w4 {% endfor %}{% if add_generation_prompt %}w3 {% endif %}"
CUE = "w90 w91 w92"
IDS = [90, 91, 92]
PI4 = {"rescale": "pi", "rescale_args": {"factor": 4.0}}


def words(n, first=5):
    return " ".join(f"w{first + i % 60}" for i in range(n))


def chatting():
    made = tokenizer()
    made.chat_template = TEMPLATE
    return made


def test_text_is_cut_and_kept():
    texts = [words(25), words(8, 9), words(3)]
    made, n = append_cue(Dataset.from_dict({"text": texts, "id": [1, 2, 3]}), tokenizer(), cue=CUE, max_length=13)
    assert n == 3 and made.column_names == ["input_ids"]
    rows = made["input_ids"]
    assert [len(row) for row in rows] == [13, 13, 9, 12, 7] and all(row[-3:] == IDS for row in rows)
    body = [i for row in rows for i in row[:-3]]
    assert body == [i for text in texts for i in [*tokenizer()(text)["input_ids"], EOS]]


@pytest.mark.parametrize("made", [tokenizer, framing])
def test_an_empty_text_gets_no_cue_and_is_left_out(made, tmp_path, caplog):
    rows, _ = append_cue(Dataset.from_dict({"text": ["", words(8)]}), made(), cue=CUE, max_length=13)
    empty, whole = rows["input_ids"]
    assert set(empty) <= {BOS, EOS} and whole[-3:] == IDS
    ids, _ = append_cue(Dataset.from_dict({"input_ids": [[EOS], [5, 6, 7]]}), made(), cue=CUE, max_length=13)
    assert ids["input_ids"] == [[EOS], [5, 6, 7, *IDS]]
    options = {"view": "endprompt", "view_args": {"target": 64}, "cue": CUE, "max_length": 13}
    data = Dataset.from_dict({"text": ["", words(8), ""]})
    run = trainer(tmp_path, train_dataset=data, processing_class=made(), **options)
    assert len(run.train_dataset) == 1 and "Left out: 2 documents of " in caplog.text


def test_each_piece_of_a_text_begins_as_the_tokenizer_begins_a_text():
    made, _ = append_cue(Dataset.from_dict({"text": [words(20)]}), framing(), cue=CUE, max_length=13)
    assert made["input_ids"] == [
        [BOS, *range(5, 14), *IDS],
        [BOS, *range(14, 23), *IDS],
        [BOS, 23, 24, EOS, *IDS],
    ]


CHAT = [{"role": "user", "content": "w5 w6"}, {"role": "assistant", "content": "w20 w21 w22"}]
KINDS = {
    "text": {"text": [words(30), words(8), words(11, 9) + " <eos>"]},
    "completion": {"prompt": [words(4), words(2, 30)], "completion": [" w20 w21 w22", " w40"]},
    "messages": {"messages": [CHAT, CHAT[:1] + CHAT]},
    "chat": {"prompt": [CHAT[:1]], "completion": [CHAT[1:]]},
}


@pytest.mark.parametrize(
    ("kind", "template"),
    [
        ("text", "$A"),
        ("text", "<bos> $A"),
        ("text", "<bos> $A <eos>"),
        ("completion", "<bos> $A <eos>"),
        ("messages", "<bos> $A"),
        ("chat", "$A"),
    ],
)
def test_no_cue_gives_the_rows_of_plain_fine_tuning(kind, template, tmp_path):
    data, made = Dataset.from_dict(KINDS[kind]), framing(template)
    made.chat_template = TEMPLATE
    options = {"train_dataset": data, "processing_class": made, "max_length": 16, "long_documents": "split"}
    control = {"view": "endprompt", "view_args": {"target": 64}, "cue": "none"}
    plain, cued = (trainer(tmp_path, **options, **more).train_dataset for more in ({}, control))
    assert cued["input_ids"] == plain["input_ids"] and cued["labels"] == plain["labels"]
    if kind == "completion":
        assert all(row[-1] == EOS for row in cued["labels"]), "a completion trains a stop"


def test_text_has_the_name_that_the_trainer_is_told(tmp_path):
    data = Dataset.from_dict({"story": [words(25)], "text": [words(3)]})
    made, _ = append_cue(data, tokenizer(), cue=CUE, max_length=13, text_field="story")
    assert sum(len(row) - 3 for row in made["input_ids"]) == 25 + 1
    options = {"view": "endprompt", "view_args": {"target": 64}, "max_length": 13}
    run = trainer(tmp_path, train_dataset=data, dataset_text_field="story", cue=CUE, **options)
    assert run.train_dataset["input_ids"] == made["input_ids"]
    with pytest.raises(ValueError, match="dataset must have text, .*, got story. Set text_field"):
        append_cue(data.remove_columns("text"), tokenizer(), max_length=13)


@pytest.mark.parametrize("chat", [False, True])
def test_a_cue_belongs_to_the_completion(chat):
    row = {"prompt": words(4), "completion": " " + words(3, 20)}
    if chat:
        row = {name: [{"role": "user", "content": value}] for name, value in row.items()}
    made, n = append_cue(Dataset.from_list([row]), chatting(), cue=CUE, max_length=20)
    (ids,), (mask,) = made["input_ids"], made["completion_mask"]
    before = [3, 5, 6, 7, 8, 4, 3] if chat else [5, 6, 7, 8]
    after = [20, 21, 22, 4 if chat else EOS, *IDS]
    assert ids == before + after and mask == [0] * len(before) + [1] * len(after) and n == 3


def test_messages_and_tokens_stay_whole():
    messages = [{"role": "user", "content": words(2)}, {"role": "assistant", "content": words(2, 20)}]
    made, _ = append_cue(Dataset.from_list([{"messages": messages}]), chatting(), cue=CUE, max_length=20)
    assert made["input_ids"][0] == [3, 5, 6, 4, 3, 20, 21, 4, *IDS]
    rows = Dataset.from_list([{"input_ids": [7] * 5, "completion_mask": [0, 0, 1, 1, 1]}])
    made, _ = append_cue(rows, tokenizer(), cue=CUE, max_length=8)
    assert made[0] == {"input_ids": [7] * 5 + IDS, "completion_mask": [0, 0, 1, 1, 1, 1, 1, 1]}
    labels, masks = [-100, -100, 7, 7, 7], [0, 0, 0, 1, 1]
    labelled = Dataset.from_list([{"input_ids": [7] * 5, "labels": labels, "assistant_masks": masks, "other": 1}])
    made, _ = append_cue(labelled, tokenizer(), cue=CUE, max_length=8)
    assert made[0] == {"input_ids": [7] * 5 + IDS, "labels": labels + IDS, "assistant_masks": [*masks, 1, 1, 1]}
    packed = Dataset.from_list([{"input_ids": [7] * 5, "seq_lengths": [2, 3]}])
    with pytest.raises(ValueError, match="packed rows .seq_lengths., and a cue ends each document"):
        append_cue(packed, tokenizer(), cue=CUE, max_length=8)
    with pytest.raises(ValueError, match="1 of 1 documents have more than 4 tokens, 7 less the cue; the longest has 5"):
        append_cue(rows, tokenizer(), cue=CUE, max_length=7)


def test_cues():
    made = tokenizer()
    assert cue_ids(made, CUE) == IDS and cue_ids(made, "none") == [] and cue_ids(made, "end-of-turn") == [2]
    assert all(cue_ids(made, name) for name in CUES)
    assert cue_ids(made, "The") and cue_ids(made, "the end") and cue_ids(made, "w93")  # no names
    for wrong, near in (("eot", None), ("sentense", "sentence"), ("end-of-turns", "end-of-turn"), ("finis", None)):
        hint = "" if near is None else f" Did you mean '{near}'?"
        with pytest.raises(ValueError, match=re.escape(f"Unknown cue '{wrong}'.{hint}") + ".*Known: end-of-turn, none"):
            cue_ids(made, wrong)
        with pytest.raises(ValueError, match=f"Unknown cue '{wrong}'"):
            RopeSFTConfig(cue=["w93", wrong], view="endprompt", view_args={"target": 64}, max_length=9, use_cpu=True)
    made.eos_token = None
    with pytest.raises(ValueError, match="needs a tokenizer with an end-of-turn or end-of-text token"):
        cue_ids(made, "end-of-turn")
    with pytest.raises(ValueError, match="cue must have at least one token"):
        cue_ids(made, "")
    with pytest.raises(ValueError, match="max_length must be above the 3 tokens of the cue, got 3"):
        append_cue(Dataset.from_dict({"text": ["w5"]}), made, cue=CUE, max_length=3)
    with pytest.raises(ValueError, match="dataset must have text, prompt and completion, messages, or input_ids"):
        append_cue(Dataset.from_dict({"question": ["w5"]}), made, max_length=30)


def test_cues_are_those_of_the_paper():
    assert CUES == {"sentence": "This is the end of text, please pay attention here", "word": "End."}


@pytest.mark.parametrize(
    ("template", "special", "expected"),
    [
        (None, [], "<eos>"),
        (None, ["<|im_end|>"], "<|im_end|>"),
        (None, ["<|im_end|>", "<|eot_id|>"], "<|eot_id|>"),
        ("{% for m in messages %}w9 {{ m.content }} <turn|> w5{% endfor %}", ["<|eot_id|>", "<turn|>"], "<turn|>"),
        ("{% for m in messages %}{{ m.content }}<eos>{% endfor %}", [], "<eos>"),
        ("{% for m in messages %}{{ m.content }}w7{% endfor %}", ["<|end|>"], "<|end|>"),
    ],
    ids=["eos", "named", "llama-3", "by-template", "template-with-eos", "template-without"],
)
def test_an_end_of_turn_is_that_of_the_chat_template(template, special, expected):
    made = tokenizer()
    made.add_tokens([AddedToken(token, special=True) for token in special])
    made.chat_template = template
    assert cue_ids(made, "end-of-turn") == [made.convert_tokens_to_ids(expected)]


@pytest.mark.parametrize(
    ("placement", "batch"),
    [("random", {}), ("end", {"packing": True}), ("end", {"padding_free": True, "max_length": None})],
)
def test_training_reads_cues_from_afar(placement, batch, tmp_path):
    texts = [words(n, n) for n in (9, 15, 30, 21, 12, 40)]
    data, n = append_cue(Dataset.from_dict({"text": texts}), tokenizer(), cue=CUE, max_length=32)
    options = {"target": 256, "cue_tokens": n, "placement": placement}
    run = trainer(tmp_path, train_dataset=data, view="endprompt", view_args=options, max_steps=1, **PI4, **batch)
    source = view_source(run.model)
    run.train()
    assert len(logged(run, "loss")) == 1
    bound = source.last
    length, skip = bound.documents.length, bound.parameters["skip"]
    assert torch.equal(bound.parameters["split"], length - n)
    assert torch.equal(skip, 256 - length) if placement == "end" else (skip < 256 - length).any()


@pytest.mark.parametrize(
    "way", [{"packing": True}, {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}]
)
def test_tokens_of_the_cue_weigh_cue_weight(way, tmp_path):
    texts = [words(n, n) for n in (9, 15, 20, 12)]
    data, n = append_cue(Dataset.from_dict({"text": texts}), tokenizer(), cue=CUE, max_length=64)
    options = {"view": "endprompt", "view_args": {"target": 64, "cue_tokens": n}, "max_steps": 1, "learning_rate": 0.0}
    options |= {"per_device_train_batch_size": 4, "objective_args": {"cue_weight": 0.25}, **way}
    run = trainer(tmp_path, train_dataset=data, **options)
    run.train()
    # by hand: sums over documents, the number of labels as it was
    model, total, n_labels = tiny(), 0.0, 0
    for row in data["input_ids"]:
        t = torch.arange(len(row))
        index = torch.where(t >= len(row) - n, t + 64 - len(row), t)
        with torch.no_grad(), rope_view(model, index=index[None]):
            log_p = model(torch.tensor([row])).logits[0].log_softmax(-1)
        ce = -log_p[:-1].gather(1, torch.tensor(row[1:])[:, None]).squeeze(1)
        total += ce[: len(row) - 1 - n].sum() + 0.25 * ce[len(row) - 1 - n :].sum()
        n_labels += len(row) - 1
    assert logged(run, "loss")[0]["loss"] == pytest.approx((total / n_labels).item(), rel=1e-4)


@pytest.mark.parametrize("kind", ["text", "completion", "chat"])
def test_the_trainer_appends_cues_by_itself(kind, tmp_path):
    pairs = [{"prompt": words(4, n), "completion": " " + words(3, n + 20)} for n in range(5, 9)]
    rows = {
        "text": [{"text": words(n, n)} for n in (9, 40, 30, 12)],
        "completion": pairs,
        "chat": [
            {"messages": [{"role": "user", "content": p["prompt"]}, {"role": "assistant", "content": p["completion"]}]}
            for p in pairs
        ],
    }[kind]
    data, made = Dataset.from_list(rows), chatting()
    options = {
        "view": "endprompt",
        "max_length": 32,
        "objective_args": {"cue_weight": 0.5},
        **PI4,
    }
    config = {"cue": CUE, "view_args": {"target": 128}}
    by_itself = trainer(tmp_path, train_dataset=data, processing_class=made, **config, **options)
    assert data.column_names == list(rows[0]) and by_itself.args.view_args == {"target": 128, "cue_tokens": 3}
    cued, n = append_cue(data, made, cue=CUE, max_length=32)
    fields = {"view_args": {"target": 128, "cue_tokens": n}, "completion_only_loss": kind == "completion"}
    by_hand = trainer(tmp_path, train_dataset=cued, processing_class=made, **fields, **options)
    assert len(by_itself.train_dataset) == len(cued) and by_itself.train_dataset[:] == by_hand.train_dataset[:]


@pytest.mark.parametrize("kind", ["text", "messages"])
def test_documents_with_cues_are_read_by_the_tokenizer_that_the_configuration_describes(kind, tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}w50 {{ m['content'] }} w51 {% endfor %}")
    data = {"text": {"text": [words(30) + " ", words(8) + " "]}, "messages": KINDS["messages"]}[kind]
    options = {"train_dataset": Dataset.from_dict(data), "max_length": 64}
    options |= {"eos_token": "w60", "chat_template_path": str(template)}
    control = {"view": "endprompt", "view_args": {"target": 64}, "cue": "none"}
    made = [chatting(), chatting()]
    plain = trainer(tmp_path, processing_class=made[0], **options).train_dataset
    cued = trainer(tmp_path, processing_class=made[1], **options, **control).train_dataset
    assert cued["input_ids"] == plain["input_ids"]
    assert all(row[-1] == {"text": 60, "messages": 51}[kind] for row in cued["input_ids"])


CHATS = Dataset.from_dict(KINDS["messages"])
WITHOUT = Dataset.from_list([{"text": "w3 w4 w5"}, {"text": None}])
AFAR = {"view": "endprompt", "view_args": {"target": 64}, "max_length": 32}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "cue goes with view='endprompt'"),
        ({**AFAR, "view_args": {"target": 64, "cue_tokens": 3}}, "view='endprompt', whose cue_tokens it sets"),
        ({**AFAR, "long_documents": "truncate"}, "cue goes with long_documents='split'"),
        (
            {**AFAR, "train_dataset": Dataset.from_dict({"text": ["w5"]}).to_iterable_dataset()},
            "cue needs a datasets.Dataset as train_dataset, got IterableDataset",
        ),
        ({**AFAR, "packing": True, "packing_strategy": "wrapped"}, "packing_strategy='wrapped' cuts documents"),
        ({**AFAR, "train_dataset": CHATS, "assistant_only_loss": True}, "cue does not work with assistant_only_loss"),
        (
            {**AFAR, "train_dataset": CHATS, "chat_template_path": "someone/model"},
            "cue needs a chat_template_path that is a template file",
        ),
        ({**AFAR, "train_dataset": WITHOUT}, "must have a text in every row: 1 of 2 rows have no 'text'"),
        ({**AFAR, "train_dataset": WITHOUT, "dataset_text_field": "body"}, "must have a column 'body'"),
    ],
)
def test_what_goes_with_no_cue_is_refused(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, cue=CUE, processing_class=chatting(), **options)


def test_a_cue_and_a_formatting_func_are_refused_by_the_trainer(tmp_path):
    options = {"view": "endprompt", "view_args": {"target": 64}, "cue": CUE, "max_length": 32}
    args = RopeSFTConfig(tmp_path, long_documents="split", use_cpu=True, bf16=False, **options)
    texts = Dataset.from_dict(KINDS["text"])
    with pytest.raises(ValueError, match="cue does not work with formatting_func"):
        RopeSFTTrainer(
            tiny(), args, train_dataset=texts, processing_class=tokenizer(), formatting_func=lambda row: row["text"]
        )


SET = ["w90 w91 w92", "w93", "w92"]  # the last one is what the first one ends with
SET_IDS = [[90, 91, 92], [93], [92]]


def test_each_document_gets_one_cue_of_a_set():
    texts = [words(n) for n in range(1, 81)] * 2
    made, n = append_cue(Dataset.from_dict({"text": texts}), tokenizer(), cue=SET, max_length=100, seed=5)
    assert n == SET_IDS
    endings = [
        row[len(tokenizer()(text)["input_ids"]) + 1 :] for row, text in zip(made["input_ids"], texts, strict=True)
    ]
    counts = [endings.count(ids) for ids in SET_IDS]
    assert sum(counts) == len(texts) and min(counts) > 35
    again, _ = append_cue(Dataset.from_dict({"text": texts}), tokenizer(), cue=SET, max_length=100, seed=5)
    other, _ = append_cue(Dataset.from_dict({"text": texts}), tokenizer(), cue=SET, max_length=100, seed=6)
    assert again["input_ids"] == made["input_ids"] != other["input_ids"]
    cut, _ = append_cue(Dataset.from_dict({"text": [words(25)]}), tokenizer(), cue=SET, max_length=13)
    assert len(cut) == 3 and all(len(row) <= 13 for row in cut["input_ids"])


@pytest.mark.parametrize("style", [None, "numpy", "torch"])
@pytest.mark.parametrize("mask", ["int8", "bool"])
def test_cues_are_put_behind_arrays_and_masks_of_any_kind(mask, style):
    ids, masks = [[5, 6, 7], [8]], [[0, 1, 1], [0]]
    features = Features({"input_ids": List(Value("int32")), "completion_mask": List(Value(mask))})
    rows = Dataset.from_dict({"input_ids": ids, "completion_mask": masks}, features=features).with_format(style)
    made, _ = append_cue(rows, tokenizer(), cue="w90", max_length=30)
    assert made[:] == {"input_ids": [row + [90] for row in ids], "completion_mask": [row + [1] for row in masks]}


@pytest.mark.parametrize("wrong", [[], ["w90", "w90"], ["w90", "none"]])
def test_what_is_no_set_of_cues_is_refused(wrong):
    with pytest.raises(ValueError, match="a set of cues must hold different ones of at least one token each"):
        append_cue(Dataset.from_dict({"text": ["w5"]}), tokenizer(), cue=wrong, max_length=30)


@pytest.mark.parametrize("batch", [{}, {"packing": True}])
def test_cues_of_different_lengths_are_read_from_afar(batch, tmp_path):
    data, cues = append_cue(
        Dataset.from_dict({"text": [words(n, n) for n in range(8, 28)]}), tokenizer(), cue=SET, max_length=64
    )
    options = {"target": 256, "cue_tokens": cues}
    run = trainer(
        tmp_path, train_dataset=data, view="endprompt", view_args=options, objective_args={"cue_weight": 0.5},
        per_device_train_batch_size=6, max_steps=1, learning_rate=0.0, **PI4, **batch,
    )  # fmt: skip
    source, seen = view_source(run.model), []
    run.model.model.register_forward_pre_hook(lambda m, args, kwargs: seen.append(kwargs), with_kwargs=True)
    run.train()
    assert len(logged(run, "loss")) == 1
    bound, inputs = source.last, seen[-1]
    ids = inputs["input_ids"]
    length = bound.documents.length.expand(ids.shape)
    split, t = bound.parameters["split"].expand(ids.shape), bound.documents.start
    positions = inputs["position_ids"] if inputs.get("position_ids") is not None else torch.arange(ids.shape[1])
    t = (positions - t).expand(ids.shape)
    ends = (t == length - 1).nonzero().tolist()
    lengths = set()
    for row, last in ends:
        n = int(length[row, last] - split[row, last])
        lengths.add(n)
        own = [c for c in SET_IDS if ids[row, last - len(c) + 1 : last + 1].tolist() == c]
        assert (
            n == max(map(len, own)) and bound.parameters["skip"].expand(ids.shape)[row, last] == 256 - length[row, last]
        )
    assert len(ends) >= 3 and lengths == {1, 3}


def test_the_weight_of_a_set_follows_each_documents_own_cue():
    ids = torch.tensor([[5, 6, 7, 90, 91, 92, 5, 6, 93, 5, 6, 7]])
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1, 2, 0, 1, 2]])
    labelled = Labelled.of({"input_ids": ids, "position_ids": positions})
    factors = CueWeight(tokens=SET_IDS, weight=0.5).factors(labelled)
    # queries that predict a token of the cue; the last one of a document predicts nothing
    labelled_ones = factors[0][labelled.next_label[0] != -100]
    assert labelled_ones.tolist() == [1, 1, 0.5, 0.5, 0.5] + [1, 0.5] + [1, 1]


def test_the_trainer_appends_a_set_by_itself(tmp_path):
    data = Dataset.from_dict({"text": [words(n, n) for n in (9, 20, 30, 12)]})
    options = {"view": "endprompt", "max_length": 40, **PI4}
    by_itself = trainer(tmp_path, train_dataset=data, cue=SET, view_args={"target": 128}, seed=8, **options)
    assert by_itself.args.view_args == {"target": 128, "cue_tokens": SET_IDS}
    cued, cues = append_cue(data, tokenizer(), cue=SET, max_length=40, seed=8)
    by_trainer = trainer(tmp_path, train_dataset=cued, view_args={"target": 128, "cue_tokens": cues}, seed=8, **options)
    assert by_itself.train_dataset[:] == by_trainer.train_dataset[:]
