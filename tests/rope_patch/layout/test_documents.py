import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rope_patch.layout.documents import count_documents, locate_documents

CPU = torch.device("cpu")


def locate(rows, seq_len, position_ids=None, attention_mask=None):
    documents = locate_documents(rows, seq_len, CPU, position_ids, attention_mask)
    return [getattr(documents, name).expand(rows, seq_len).tolist() for name in ("start", "length", "ordinal")]


def test_rows_are_documents_when_nothing_else_is_said():
    assert locate(2, 3) == [[[0] * 3] * 2, [[3] * 3] * 2, [[0] * 3, [1] * 3]]


def test_padding_does_not_count():
    mask = torch.tensor([[1, 1, 1, 0], [0, 0, 1, 1]])
    start, length, ordinal = locate(2, 4, attention_mask=mask)
    assert start == [[0] * 4, [2] * 4]  # positions are token indices here, also behind left padding
    assert length == [[3] * 4, [2] * 4]
    assert ordinal == [[0] * 4, [1] * 4]


def test_left_padding_with_positions_from_generate():
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    for filled in (0, 1):  # what Transformers gives padding differs between versions
        positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, filled)
        start, length, ordinal = locate(2, 5, positions, mask)
        assert [row[2:] for row in start] == [[0] * 3, [0] * 3]
        assert length == [[3] * 5, [5] * 5]
        assert ordinal == [[0] * 5, [1] * 5]


def test_a_mask_of_another_rank_says_nothing():
    assert locate(1, 4, attention_mask=torch.ones(1, 1, 4, 4)) == locate(1, 4)


def test_a_row_of_padding_alone_is_a_document_of_length_one():
    mask = torch.tensor([[0, 0, 0], [1, 1, 0]])
    for positions in (None, torch.arange(3)[None]):
        _, length, ordinal = locate(2, 3, positions, mask)
        assert length == [[1] * 3, [2] * 3]
        assert ordinal == [[0] * 3, [1] * 3]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(0, 3), st.integers(0, 3)),
        min_size=1,
        max_size=3,
    )
)
def test_packed_and_padded_rows_against_a_loop(rows):
    seq_len = max(sum(lengths) + left for lengths, left, _ in rows) + 2
    positions = torch.zeros(len(rows), seq_len, dtype=torch.int64)
    mask = torch.zeros(len(rows), seq_len, dtype=torch.int64)
    expected = {}
    ordinal = 0
    for row, (lengths, left, first) in enumerate(rows):
        at = left
        for n in lengths:
            positions[row, at : at + n] = first + torch.arange(n)
            mask[row, at : at + n] = 1
            for token in range(at, at + n):
                expected[row, token] = (first, n, ordinal)
            at += n
            ordinal += 1
    start, length, number = locate(len(rows), seq_len, positions, mask)
    assert {
        place: (start[place[0]][place[1]], length[place[0]][place[1]], number[place[0]][place[1]]) for place in expected
    } == expected


def test_packed_rows_without_a_mask():
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]])
    start, length, ordinal = locate(2, 6, positions)
    assert start == [[0] * 6] * 2
    assert length == [[3, 3, 3, 2, 2, 1], [6] * 6]
    assert ordinal == [[0, 0, 0, 1, 1, 2], [3] * 6]
    assert count_documents({"input_ids": positions, "position_ids": positions}) == 4
