"""Work of reading prompts that begin alike, by hand."""

from eval_attention import reading


def test_what_prompts_share_is_counted_once():
    # a token looks at itself and at those before it: 1 + 2 + 3 + 4, then 4 behind the three that are shared
    assert reading([[1, 2, 3, 4]]) == (4, 10)
    assert reading([[1, 2, 3, 5], [1, 2, 3, 4]]) == (5, 14)
    # the last token of the same prompt is read again, for what follows it
    assert reading([[1, 2, 3, 4], [1, 2, 3, 4]]) == (5, 14)
    # one that ends where the next goes on
    assert reading([[1, 2], [1, 2, 3, 4]]) == (4, 10)
    assert reading([[1, 2], [3, 4], [1, 5]]) == (5, 3 + 2 + 3)
