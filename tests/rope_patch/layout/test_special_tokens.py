"""Rows of a long text have the tokens that the tokenizer puts around one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from rope_patch.layout.special_tokens import SpecialTokens, cut_document

BEGIN, END = 0, 1


def make_tokenizer(template: str) -> PreTrainedTokenizerFast:
    letters = {"<s>": BEGIN, "</s>": END} | {letter: i for i, letter in enumerate("abcdefghijklmnopqrstuvwxyz", 2)}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    if template != "$A":
        tokenizer.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=[("<s>", BEGIN), ("</s>", END)]
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize(
    ("template", "begin", "end"),
    [("$A", (), ()), ("<s> $A", (BEGIN,), ()), ("<s> $A </s>", (BEGIN,), (END,)), ("$A </s>", (), (END,))],
)
def test_special_tokens_are_those_that_the_tokenizer_adds(template, begin, end):
    assert SpecialTokens.of(make_tokenizer(template)) == SpecialTokens(begin, end)


@given(n=st.integers(0, 60), seq_len=st.integers(2, 20), begin=st.booleans(), end=st.booleans())
def test_rows_hold_every_token_once_and_begin_as_a_text(n, seq_len, begin, end):
    special = SpecialTokens((BEGIN,) * begin, (END,) * end)
    ids = list(range(2, n + 2))
    rows = cut_document(ids, seq_len, special)
    assert all(len(row) <= seq_len and row[: len(special.begin)] == list(special.begin) for row in rows)
    assert all(len(row) == seq_len for row in rows[:-1])
    body = [token for row in rows for token in row[len(special.begin) :]]
    assert body == ([*ids, *special.end] if ids else [])
    whole = cut_document(ids, seq_len, special, keep_rest=False)
    assert whole == [row for row in rows if len(row) == seq_len]


def test_rows_without_room_are_refused():
    with pytest.raises(ValueError, match="seq_len must leave room beside the 1 tokens"):
        cut_document([5], 1, SpecialTokens((BEGIN,), ()))
