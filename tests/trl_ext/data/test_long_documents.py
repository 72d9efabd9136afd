"""Rows of exactly one length from each document."""

import pytest
from datasets import Dataset
from support.characters import character_tokenizer
from tokenizers import processors

from trl_ext.data.long_documents import cut_into_rows

TEXT = "It was a dark night. The wind blew! Who was there? " * 20
DOCUMENTS = Dataset.from_list([{"text": TEXT}, {"text": "short"}, {"text": TEXT[7:500]}])


def test_rows_are_cut_from_each_document_on_its_own():
    tokenizer = character_tokenizer()
    made, coverage = cut_into_rows(DOCUMENTS, tokenizer, 100)
    rows = made["input_ids"]
    assert len(rows) == len(TEXT) // 100 + 493 // 100 and {len(row) for row in rows} == {100}
    assert tokenizer.decode(rows[0]) == TEXT[:100] and tokenizer.decode(rows[len(TEXT) // 100]) == TEXT[7:107]
    left = len(TEXT) % 100 + 5 + 493 % 100
    total = len(TEXT) + 5 + 493
    assert coverage == (
        f"{total:,} tokens of 3 documents give {len(rows)} rows of 100; {left} tokens ({left / total:.1%}) are in no "
        "row: ends of documents, and documents too short for one."
    )
    with pytest.raises(ValueError, match="no document has 9000 tokens"):
        cut_into_rows(DOCUMENTS, tokenizer, 9000)
    with pytest.raises(ValueError, match="a dataset, no stream, with a column 'text', got a Dataset with a"):
        cut_into_rows(Dataset.from_list([{"a": "b"}]), tokenizer, 4)
    with pytest.raises(ValueError, match="got a IterableDataset with text"):
        cut_into_rows(DOCUMENTS.to_iterable_dataset(), tokenizer, 4)


def test_every_row_begins_as_the_tokenizer_begins_a_text():
    tokenizer = character_tokenizer()
    plain = tokenizer(TEXT)["input_ids"]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", tokenizer.bos_token_id)]
    )
    made, coverage = cut_into_rows(DOCUMENTS, tokenizer, 100)
    rows = made["input_ids"]
    assert all(row[0] == tokenizer.bos_token_id and len(row) == 100 for row in rows)
    assert not any(tokenizer.bos_token_id in row[1:] for row in rows)
    of_text = rows[: len(TEXT) // 99]
    assert [i for row in of_text for i in row[1:]] == plain[: 99 * len(of_text)], "nothing lost, nothing twice"
    assert f"; {len(TEXT) % 99 + 5 + 493 % 99} tokens" in coverage
