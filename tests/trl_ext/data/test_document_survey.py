"""What a survey says of documents is what its definitions say of their tokens, one by one."""

import pytest
from datasets import Dataset, Features, List, Value
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_ext.data.document_survey import Survey

SPECIAL = (0, 1, 2)
FEATURES = Features({"input_ids": List(Value("int32")), "labels": List(Value("int64"))})
TOKENS = st.tuples(st.integers(0, 5), st.booleans())


def set_of(documents):
    ids = [[token for token, _ in document] for document in documents]
    labels = [[token if has_label else -100 for token, has_label in document] for document in documents]
    return Dataset.from_dict({"input_ids": ids, "labels": labels}, features=FEATURES)


def by_token(document, labelled, joined, limit, keep_end):
    """(teaches, masked, teaches_kept) of one document."""
    n = len(document)
    predicted = range(0 if joined else 1, n)
    has_text = any(token not in SPECIAL for token, _ in document)
    if limit is None:
        kept = range(n)
    else:
        kept = range(max(n - limit, 0) + 1, n) if keep_end else range(min(n, limit))
    labels = {i for i in predicted if document[i][1]}
    read = labels if labelled else set(predicted)
    return has_text and bool(read), 0 < len(labels) < len(predicted), has_text and bool(read & set(kept))


@given(
    documents=st.lists(st.lists(TOKENS, max_size=6), min_size=1, max_size=12),
    labelled=st.booleans(),
    joined=st.booleans(),
    limit=st.none() | st.integers(1, 7),
    keep_end=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_a_survey_is_what_its_definitions_say(documents, labelled, joined, limit, keep_end):
    made = Survey.of(set_of(documents), SPECIAL, labelled=labelled, joined=joined, limit=limit, keep_end=keep_end)
    assert made.lengths.tolist() == [len(document) for document in documents]
    told = zip(made.teaches.tolist(), made.masked.tolist(), made.teaches_kept.tolist(), strict=True)
    assert list(told) == [by_token(document, labelled, joined, limit, keep_end) for document in documents]


def test_rows_with_too_few_labels_are_refused():
    dataset = Dataset.from_dict({"input_ids": [[5, 6], [7]], "labels": [[5], [7, 8]]}, features=FEATURES)
    with pytest.raises(ValueError, match="each row must have as many labels"):
        Survey.of(dataset, SPECIAL)
