"""Grids of prompts: the shortest that fit, kinds that share their texts."""

import re
from dataclasses import replace

import pytest
from support.retrieval import TEXT, TOKENIZER

from rope_patch.eval import EvalPlan
from rope_patch.eval.measures import prompt_grid
from rope_patch.eval.measures.prompt_grid import ALL_WORDINGS, PromptGrid
from rope_patch.prompts.needles import KINDS

PARTNERS = [("multikey", "multiquery"), ("multivalue", "ordinal")]


@pytest.mark.parametrize("kind", KINDS)
def test_the_shortest_prompt_fits_and_hardly_less_does(kind):
    n = prompt_grid.shortest_prompt(kind, TOKENIZER, "auto")
    prompt_grid.check_retrieval(kind, TOKENIZER, [TEXT], [n], "auto")
    for length in (n - 150, 5):
        message = (
            f"^{length} tokens are too few for the needles, the question and the reply of '{kind}': use lengths of"
        )
        with pytest.raises(ValueError, match=f"{message} at least {n}"):
            prompt_grid.check_retrieval(kind, TOKENIZER, [TEXT], [length], "auto")


def test_the_first_length_that_is_told_is_enough_for_all_kinds():
    kinds = tuple(f"niah-{kind}" for kind in KINDS if kind not in ("passkey", "several"))
    plan = EvalPlan(measures=("passkey", "several", *kinds), length=100, n_rows=1, lengths=(5,))
    with pytest.raises(ValueError, match="use lengths of at least") as raised:
        plan.check(TOKENIZER, [TEXT])
    least = int(str(raised.value).rstrip(".").rsplit(" ", 1)[1])
    replace(plan, lengths=(least,)).check(TOKENIZER, [TEXT])


@pytest.mark.parametrize("chat", ["off", "auto"])
def test_several_asks_about_one_text_at_all_depths(chat):
    depths = (0.1, 0.3, 0.5, 0.7, 0.9)
    grid = PromptGrid("several", TOKENIZER, [2000], depths, 2, 4, 0, chat, ALL_WORDINGS)
    prompts = grid.prompts(2000, prompt_grid.passkey_haystacks(TOKENIZER, [2000]))
    for about in (prompts[::2], prompts[1::2]):
        text = TOKENIZER.decode(about[0].ids)
        pass_keys = dict(
            re.findall(r" The pass key of (\w+) is (\d{5})\. Remember it\. \2 is the pass key of \1\.", text)
        )
        assert len(pass_keys) == len(set(pass_keys.values())) == 5
        for depth, prompt, (name, key) in zip(depths, about, pass_keys.items(), strict=True):
            assert prompt.answers == [key] and prompt.question.startswith(f"What is the pass key of {name}?")
            assert len(prompt.ids) + grid.new_tokens == 2000 and abs(prompt.position / 2000 - depth) < 0.12
            # the questions differ in length: only they and the filler before them are read again
            assert prompt.ids[: about[-1].position + 70] == about[0].ids[: about[-1].position + 70]
    assert not {p.answers[0] for p in prompts[::2]} & {p.answers[0] for p in prompts[1::2]}


@pytest.mark.parametrize("kinds", PARTNERS, ids=" and ".join)
@pytest.mark.parametrize("chat", [False, True])
def test_kinds_that_ask_about_the_same_needles_share_their_text_prompt_by_prompt(kinds, chat):
    options = ([2000], (0.05, 0.5, 0.95), 4, 4, 0, "auto", ALL_WORDINGS)
    grids = {kind: PromptGrid(kind, TOKENIZER, *options) for kind in (*kinds, "single")}
    haystacks = prompt_grid.text_haystacks(TOKENIZER, TEXT, [2000])
    one, other = (grids[kind].prompts(2000, haystacks) for kind in kinds)
    for a, b in zip(one, other, strict=True):
        assert a.position == b.position and a.wording == b.wording and set(b.answers) & set(a.answers)
        assert len(a.ids) + grids[kinds[0]].new_tokens == len(b.ids) + grids[kinds[1]].new_tokens == 2000
        shared = next(k for k, (x, y) in enumerate(zip(a.ids, b.ids, strict=False)) if x != y)
        # all but the questions, and the text for which the other's longer question and reply leave no room
        assert shared >= 2000 - 64 - 300
        needles = re.findall(r"\d{7}", TOKENIZER.decode(a.ids[:shared]))
        assert len(needles) == 4
    # within a kind every prompt hides other needles: their scores are independent
    values = [frozenset(re.findall(r"\d{7}", TOKENIZER.decode(p.ids))) for p in one]
    assert len(set(values)) == len(values) and not frozenset.intersection(*values)
