"""Grids of models that always or never find the needle, and grids that are asked together."""

import sys

import pytest
import torch
from support.characters import CHARACTERS
from support.retrieval import TEXT, TOKENIZER, lookup
from support.tiny import tiny

import rope_patch.eval.measures.retrieval  # the package has a function of this name too
import rope_patch.generation.reading as reading
from rope_patch.eval import RetrievalGrid, niah, passkey
from rope_patch.eval.measures import prompt_grid
from rope_patch.eval.measures.prompt_grid import ALL_WORDINGS
from rope_patch.generation.generation import bytes_per_token
from rope_patch.generation.reading import Reply
from rope_patch.prompts.needles import KINDS

retrieval = sys.modules["rope_patch.eval.measures.retrieval"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_always_finds_scores_one_and_one_that_never_does_scores_zero(kind):
    def grid(model, *lengths):
        options = {"depths": (0.0, 0.5, 1.0), "trials": 1, "batch_size": 4, "progress": False}
        if kind == "passkey":
            return passkey(model, TOKENIZER, lengths, **options)
        return niah(model, TOKENIZER, TEXT, lengths, kind=kind, **options)

    always, never = grid(lookup(), 700, 900), grid(lookup(lambda text, values: []), 700)
    assert always.accuracy == [[1.0] * 3] * 2 and never.accuracy == [[0.0] * 3]
    assert len(always.scores) == len(always.places) == 6
    if kind in ("passkey", "single"):  # the answer stands where the depth says
        assert always.places[3:] == pytest.approx(always.depths, abs=0.3)
    assert RetrievalGrid.from_dict(always.to_dict()) == always
    assert always.table()[0]["as_written"] == 1 and always.by_length == [1, 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "dual"}, "kind must be one of passkey, several, .*, got 'dual'"),
        ({"depths": [1.5]}, r"depths must be in \[0, 1\], got \[1.5\]"),
        ({"lengths": [100]}, "too few for the needles, the question and the reply"),
        ({"lengths": [9000]}, "the haystack has 4080 tokens"),
        ({"kind": "ordinal", "n_needles": 9}, "'ordinal' needs n_needles <= 8, got 9"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        niah(lookup(), TOKENIZER, TEXT, arguments.pop("lengths", [1000]), progress=False, **arguments)


@pytest.mark.parametrize("kind", ["passkey", "multikey"])
def test_a_cell_holds_as_many_prompts_as_asked_all_different_all_wordings_equally(kind, monkeypatch):
    """The same prompts for every model."""
    prompts = []

    def answer(model, questions, **_):
        prompts.extend(tuple(q.prompt) for q in questions)
        reply = Reply(TOKENIZER(model)["input_ids"], [0] * 50)
        return [reply] * len(questions)

    monkeypatch.setattr(retrieval, "ask_greedily", answer)
    options = {"trials": 8, "progress": False, "batch_size": 50}

    def grid(model):
        if kind == "passkey":
            return passkey(model, TOKENIZER, [500], **options)
        return niah(model, TOKENIZER, TEXT, [900], kind=kind, **options)

    first, second = grid("nothing"), grid("other")
    assert len(set(prompts[:80])) == len(first.scores) == 80 and prompts[:80] == prompts[80:]
    assert first.prompt_hashes == second.prompt_hashes and first.wordings == second.wordings
    assert {w: first.wordings.count(w) for w in ALL_WORDINGS} == dict.fromkeys(ALL_WORDINGS, 20)
    for depth in range(10):
        assert {first.wordings[8 * depth : 8 * depth + 8].count(w) for w in ALL_WORDINGS} == {2}
    assert {reply["reply"] for reply in second.replies} == {"other"}
    assert [reply["wording"] for reply in first.replies] == list(ALL_WORDINGS)
    haystack = prompt_grid.passkey_haystacks if kind == "passkey" else prompt_grid.text_haystacks
    assert len(haystack(TOKENIZER, *(() if kind == "passkey" else (TEXT,)), [900])) == (4 if kind == "passkey" else 1)


def test_grids_asked_together_are_those_of_each_kind_alone_and_read_less(monkeypatch):
    monkeypatch.setattr(reading, "_TOGETHER", {"cpu": 0})
    model, read = tiny(vocab_size=CHARACTERS), []
    with torch.no_grad():
        assert bytes_per_token(model)  # which is found out once, by a few forwards
    model.model.layers[0].register_forward_hook(lambda *x: read.append(x[2].shape[:2].numel()))
    options = {"depths": (0.3,), "trials": 1, "progress": False}
    kinds = ("passkey", "multikey", "multivalue", "multiquery", "ordinal")
    together = rope_patch.eval.retrieval(model, TOKENIZER, TEXT, [700], kinds=kinds, **options)
    n_together = sum(read)
    read.clear()
    alone = {kind: niah(model, TOKENIZER, TEXT, [700], kind=kind, **options) for kind in kinds[1:]}
    alone["passkey"] = passkey(model, TOKENIZER, [700], **options)
    assert together == alone
    assert n_together < 0.8 * sum(read)
