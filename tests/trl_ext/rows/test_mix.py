"""Rows of several kinds: shares, lengths, labels, seeds, and what a trainer reads of them."""

import random
from collections import Counter

import pytest
import torch
from support.characters import CHARACTERS, character_tokenizer
from support.tiny import tiny
from support.training import logged, trainer
from tokenizers import processors
from torch.nn import functional as F  # noqa: N812

from trl_ext.rows import make_rows, mixed_rows, text_rows_for_training
from trl_ext.rows.mix import rows_by_kind
from trl_ext.rows.pieces import Pieces
from trl_ext.rows.row import ASKING, SKILLS

BOS = 1
TEXTS = [" ".join(f"{name}{i}." for i in range(n)) for name, n in (("ab", 900), ("cd", 500), ("ef", 30))]
LENGTH = 4000
CHATS = [[BOS, *[40 + k] * (100 + 70 * k), 2] for k in range(12)]


def bos_tokenizer():
    made = character_tokenizer()
    made.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", BOS)]
    )
    return made


def rows_of(n=16, **options):
    options = {"length": LENGTH, "texts": TEXTS, "chats": CHATS, "facts": 4, "progress": False, **options}
    return make_rows(bos_tokenizer(), n, **options)


def test_shares_lengths_and_labels():
    rows = rows_of(16, shares={"text": 1, "chats": 1, "questions": 2})
    counts = Counter((row.kind, len(row.ids)) for row in rows)
    short = LENGTH // 8
    assert counts == {
        ("text", LENGTH): 3,
        ("text", short): 8,
        ("chats", LENGTH): 3,
        ("chats", short): 8,
        ("questions", LENGTH): 6,
        ("questions", short): 16,
    }
    assert sum(len(row.ids) for row in rows) == 16 * LENGTH
    for row in rows:
        assert len(row.labelled) == len(row.ids) and any(row.labelled) == (row.kind == "questions")
        assert row.ids[0] == BOS
    kinds = [row.kind for row in rows]
    assert kinds != sorted(kinds) and kinds != sorted(kinds, reverse=True), "shuffled"
    for row in rows_of(16, label_all=True):
        assert all(row.labelled) == (row.kind not in ASKING)


def test_a_seed_gives_the_same_rows():
    assert rows_of(seed=1) == rows_of(seed=1) != rows_of(seed=2)
    n = 5
    made = text_rows_for_training(bos_tokenizer(), TEXTS, n, length=300, seed=4)
    assert made == text_rows_for_training(bos_tokenizer(), TEXTS, n, length=300, seed=4)
    assert made != text_rows_for_training(bos_tokenizer(), TEXTS, n, length=300, seed=5)


def test_rows_of_text_are_pieces_of_one_text_at_random_places():
    tokenizer = bos_tokenizer()
    rows = text_rows_for_training(tokenizer, TEXTS[:2], 60, length=200)
    starts = Counter()
    for row in rows:
        assert row.ids[0] == BOS and len(row.ids) == 200 and not any(row.labelled)
        text = tokenizer.decode(row.ids[1:])
        (number,) = [k for k, whole in enumerate(TEXTS[:2]) if text in whole]
        place = TEXTS[number].index(text)
        assert place == 0 or TEXTS[number][place - 1] == " " or TEXTS[number].endswith(text)
        starts[number] += 1
    assert len({tuple(row.ids) for row in rows}) > 50 and starts[0] > starts[1] > 5, "by their length"


def test_short_texts_are_joined_and_none_is_taken_twice():
    tokenizer, texts = bos_tokenizer(), ["abc def.", "ghi jkl.", " \n", "mno."]
    whole = 8 + 8 + 4 + 2 * 2
    result = tokenizer.decode(Pieces(tokenizer, texts).draw(whole, random.Random(0)))
    assert sorted(result.split("\n\n")) == sorted(text for text in texts if text.strip())
    with pytest.raises(ValueError, match=f"the texts hold {whole} tokens together, and a row needs {whole + 1} of"):
        Pieces(tokenizer, texts).draw(whole + 1, random.Random(0))
    with pytest.raises(ValueError, match="texts must hold at least one document that is not blank, got none"):
        Pieces(tokenizer, ["", " "])


def test_chats_are_whole_where_they_fit_and_used_once_before_one_is_used_again():
    rows = rows_of(2, shares={"chats": 1}, short=0)
    for row in rows:
        starts = [place for place, i in enumerate(row.ids) if i == BOS]
        pieces = [row.ids[a:b] for a, b in zip(starts, [*starts[1:], LENGTH], strict=True)]
        assert all(piece in CHATS for piece in pieces[:-1]) and any(c[: len(pieces[-1])] == pieces[-1] for c in CHATS)
    first = [i for i in rows_of(1, shares={"chats": 1}, short=0)[0].ids if i >= 40]
    assert all(first.count(i) <= 100 + 70 * (i - 40) for i in first), "none twice while others are left"


def test_rows_are_counted_by_their_shares():
    assert rows_by_kind(288) == {"text": 96, "chats": 96, "questions": 24, **dict.fromkeys(SKILLS, 12)}
    assert rows_by_kind(5, {"text": 0, "questions": 3.0, "own_texts": 1}) == {"questions": 4, "own_texts": 1}
    assert all(sum(rows_by_kind(n).values()) == n for n in range(1, 30))


def test_what_the_model_writes_is_asked_for_when_all_else_is_right():
    called = []

    def chats():
        called.append("chats")
        return CHATS

    with pytest.raises(ValueError, match="length must leave room"):
        rows_of(facts=90, chats=chats)
    assert not called
    assert rows_of(chats=chats) == rows_of() and called == ["chats"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"shares": {"book": 1}},
            "shares must be of text, chats, questions, own_texts, chain, .*, passage, got 'book'",
        ),
        ({"shares": {"text": -1}}, "the share of text must be a number of at least 0, got -1"),
        ({"shares": {"text": 0}}, "shares must have a weight above 0"),
        ({"shares": {"text": 1e308, "questions": 1e308}}, "and a finite sum, got"),
        ({"short": 2}, "short must be a share from 0 to 1, got 2"),
        ({"chats": []}, "chats must hold texts .* sample some with own_chats, or leave 'chats' out"),
        ({"shares": {"own_texts": 1}}, "own_texts must hold texts .* sample some with own_texts, or leave"),
        ({"chat": 1}, "no chat template"),
        ({"texts": ["Short."]}, "give more or longer texts"),
    ],
)
def test_what_cannot_be_made_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        rows_of(**options)


def test_a_trainer_reads_the_labelled_tokens_alone(tmp_path, caplog):
    rows = mixed_rows(
        bos_tokenizer(), 3, length=1600, texts=TEXTS, chats=CHATS, facts=2, short=0.34, progress=False, seed=2
    )
    assert rows.column_names == ["input_ids", "completion_mask"] and len(rows) == 3
    rows = mixed_rows(
        bos_tokenizer(), 3, length=1600, texts=TEXTS, facts=2, shares={"text": 1, "questions": 2}, progress=False
    )
    model = tiny(vocab_size=CHARACTERS, max_position_embeddings=1600)
    total = labels = 0
    with torch.no_grad():
        for row in rows:
            ids, mask = torch.tensor(row["input_ids"]), torch.tensor(row["completion_mask"]).bool()
            losses = F.cross_entropy(model(ids[None]).logits[0, :-1], ids[1:], reduction="none")
            total, labels = total + losses[mask[1:]].sum(), labels + mask.sum()
    options = {"max_length": 1600, "max_steps": 1, "per_device_train_batch_size": 8, "learning_rate": 0.0}
    run = trainer(tmp_path, model=model, train_dataset=rows, processing_class=bos_tokenizer(), **options)
    assert run.args.completion_only_loss
    run.train()
    (step,) = logged(run, "loss")
    assert step["loss"] == pytest.approx((total / labels).item(), abs=2e-4)
    assert "without a token to predict" in caplog.text, "text without labels is left out, and told"


def test_what_the_user_says_of_masks_holds(tmp_path):
    rows = mixed_rows(bos_tokenizer(), 2, length=1600, texts=TEXTS, facts=2, shares={"questions": 1}, progress=False)
    model = tiny(vocab_size=CHARACTERS, max_position_embeddings=1600)
    options = {"train_dataset": rows, "processing_class": bos_tokenizer(), "max_length": 1600}
    run = trainer(tmp_path, model=model, completion_only_loss=False, **options)
    assert all(row["labels"] == row["input_ids"] for row in run.train_dataset)
