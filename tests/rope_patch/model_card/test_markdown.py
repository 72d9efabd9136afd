"""No value is more than its own text, in a line or in a cell of a table. The oracle is a parser of CommonMark."""

import pytest

from rope_patch.model_card.markdown import code, fenced, text

HOSTILE = [
    "<script>alert(1)</script>", "\n\n# Heading\n", "[a](https://b.c)", "![a](b)", "`", "``` a", "a | b", "\\| <b> |",
    "\\\\| `<b>` |", "`|`<b>", "<https://b.c>", "http://b.c", "www.b.c", "a\u2028# b", "\n---\n", "&lt;b&gt;", "\\", "",
]  # fmt: skip


def inline(page):
    markdown_it = pytest.importorskip("markdown_it")
    tokens = markdown_it.MarkdownIt("commonmark", {"html": True}).enable("table").parse(page)
    return tokens, [child for token in tokens for child in token.children or []]


@pytest.mark.parametrize("shown", [text, code], ids=["text", "code"])
@pytest.mark.parametrize("value", HOSTILE)
def test_a_value_stays_in_its_cell_and_is_nothing_but_text(value, shown):
    blocks, children = inline(f"| a | b |\n|---|---|\n| {shown(value)} | end |\n\nBefore {shown(value)} behind.\n")
    kinds = [block.type for block in blocks if block.type.endswith("_open")]
    cells = ["tr_open", *["th_open"] * 2], ["tr_open", *["td_open"] * 2]
    assert kinds == ["table_open", "thead_open", *cells[0], "tbody_open", *cells[1], "paragraph_open"]
    assert {child.type for child in children} <= {"text", "code_inline"}
    assert [child.content for child in children][-1].endswith("behind.") or shown(value) == '""'


@pytest.mark.parametrize("value", ["every weight", "owner/books", "0.01, constant", "LoRA of rank 4 on q_proj, v_proj"])
def test_what_is_plain_stays_plain(value):
    assert text(value) == value and code(value) == f"`{value}`"


def test_a_block_of_code_goes_on_to_its_end():
    blocks, _ = inline(f"```bibtex\n{fenced('@misc{a,' + chr(10) + '```' + chr(10) + '# b')}\n```\n")
    assert [block.type for block in blocks] == ["fence"]
