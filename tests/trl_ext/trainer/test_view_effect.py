"""A view that can change nothing that is learned from the documents of a run is refused before the run."""

from functools import partial

import pytest
import torch
from datasets import Dataset
from support.training import documents, trainer

from rope_patch.layout.document_lengths import document_lengths
from rope_patch.views import Compose, Cyclic, EndPrompt, LongRecipe, Mix, PerLayer, PosAug, PoSE, Skip, Standard
from trl_ext.trainer import training_set
from trl_ext.trainer.training_set import document_tokens
from trl_ext.trainer.view_effect import require_effect_on

SAME = Dataset.from_list([{"input_ids": row["input_ids"][:12]} for row in documents(8)])  # 12 tokens each

# view, lengths, whether the loss reads what the last token sees
NOTHING = {
    "one token of cue": (EndPrompt(target=64, cue_tokens=1), [12, 20], False),
    "cues of one token": (EndPrompt(target=64, cue_tokens=1, placement="random"), [12], False),
    "as long as the target": (EndPrompt(target=12, cue_tokens=3), [12], True),
    "a split at the last token": (Skip(split=11, skip=5), [12], False),
    "skips that cancel": (Compose([Skip(split=5, skip=30), Skip(split=35, skip=-30)]), [12, 40], True),
    "factors that cancel": (Compose([PosAug(0.5), PosAug(2.0)]), [12, 900], True),
    "turns that cancel": (Compose([Cyclic(shift=6), Cyclic(shift=6)]), [12], True),
    "by layer": (PerLayer(EndPrompt(target=12, cue_tokens=3), "top"), [12], True),
    "one token": (Skip(), [1], True),
    "one view of a mix": (Mix([Skip(skip=9), EndPrompt(target=12, cue_tokens=3)]), [12], True),
}
SOMETHING = {
    "one token of cue, which the loss reads": (EndPrompt(target=64, cue_tokens=1), [12, 20], True),
    "a few documents": (Skip(split=5000, skip=1), [12] * 99 + [5002], False),
    "short ones": (EndPrompt(target=1000, cue_tokens=2), [1000] * 99 + [12], False),
    "turns that do not": (Compose([Cyclic(shift=6), Cyclic(shift=6)]), [12, 13], True),
    "drawn": (Skip(), [3], False),
    "pose": (PoSE(target=64), [12], False),
    "a mix that rarely moves": (Mix([Standard(), Skip(split=5, skip=9)], [0.999, 0.001]), [12], False),
}  # fmt: skip


# view, documents, whether the loss reads what the last token sees
CUES = EndPrompt(target=64, cue_tokens=[[5], [6, 7]])
SENTENCES = LongRecipe(target=64, sentence_ends=[9])
NOTHING_BY_TOKENS = {
    "no document ends with a cue": (CUES, [[1, 2, 3, 4], [6, 7, 1], [1, 2, 7]], True),
    "cues of one token": (CUES, [[1, 2, 3, 5], [4, 5]], False),
    "a cue is all of the document": (CUES, [[6, 7], [6, 7]], True),
    "a cue across documents": (CUES, [[1, 2, 6], [7, 1, 2]], True),
    "as long as the target": (EndPrompt(target=4, cue_tokens=[[6, 7]]), [[1, 2, 6, 7]], True),
    "no sentence ends within": (SENTENCES, [[1, 2, 3], [1, 2, 3, 9], [4, 5]], True),
    "a sentence of one token at the end": (SENTENCES, [[1, 2, 9, 3]], False),
    "by layer": (PerLayer(CUES, "top"), [[1, 2, 3, 4]], True),
    "one view of a mix": (Mix([Skip(skip=9), CUES]), [[1, 2, 3, 4]], True),
    "undone": (Compose([CUES, Skip(split=2, skip=-60)]), [[1, 2, 6, 7]], True),
}
SOMETHING_BY_TOKENS = {
    "a cue": (CUES, [[1, 2, 3, 4]] * 9 + [[1, 6, 7]], False),
    "a cue of one token, which the loss reads": (CUES, [[1, 2, 5]], True),
    "sentences": (SENTENCES, [[1, 2, 3], [1, 9, 3, 4, 9, 5]], False),
    "together": (Compose([CUES, Skip(split=1, skip=9)]), [[1, 2, 3, 4]], False),
    "by layer": (PerLayer(CUES, "top"), [[1, 2, 6, 7]], False),
    "sentences by layer": (PerLayer(SENTENCES, [0]), [[1, 9, 3, 4, 9, 5]], False),
    "a mix": (Mix([Standard(), CUES], [0.999, 0.001]), [[1, 2, 6, 7]], False),
}


def check(view, dataset, reads_last, controls=False):
    lengths, documents = document_lengths(dataset), partial(document_tokens, dataset)
    require_effect_on(view, lengths, 2, reads_last=reads_last, controls=controls, documents=documents)


def of_lengths(*lengths):
    return Dataset.from_list([{"input_ids": list(range(n))} for n in lengths])


def rows_of(documents, packed):
    """One document a row, or all in one as TRL packs them."""
    if not packed:
        return Dataset.from_list([{"input_ids": one} for one in documents])
    row = {"input_ids": [token for one in documents for token in one], "seq_lengths": [len(one) for one in documents]}
    return Dataset.from_list([row])


@pytest.mark.parametrize("case", NOTHING)
def test_a_view_without_effect_is_refused(case):
    view, lengths, reads_last = NOTHING[case]
    with pytest.raises(ValueError, match="changes no distance between tokens in documents of"):
        check(view, of_lengths(*lengths), reads_last)


@pytest.mark.parametrize("case", SOMETHING)
def test_a_view_with_an_effect_passes(case):
    view, lengths, reads_last = SOMETHING[case]
    check(view, of_lengths(*lengths), reads_last)


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("case", NOTHING_BY_TOKENS)
def test_a_view_whose_tokens_are_nowhere_is_refused(case, packed):
    view, documents, reads_last = NOTHING_BY_TOKENS[case]
    with pytest.raises(ValueError, match="No document has the view's tokens"):
        check(view, rows_of(documents, packed), reads_last)


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("case", SOMETHING_BY_TOKENS)
def test_a_view_whose_tokens_are_somewhere_passes(case, packed):
    view, documents, reads_last = SOMETHING_BY_TOKENS[case]
    check(view, rows_of(documents, packed), reads_last)


def test_all_documents_are_looked_at_and_no_more_than_needed(monkeypatch):
    monkeypatch.setattr(training_set, "_PART", 8)
    documents = [[1, 2, 3, 4]] * 20 + [[1, 2, 6, 7]] + [[1, 2, 3, 4]] * 20
    parts = list(document_tokens(rows_of(documents, False)))
    assert [len(lengths) for _, lengths in parts] == [2] * 20 + [1]
    assert torch.cat([ids for ids, _ in parts]).tolist() == sum(documents, [])
    seen = []

    def telling():
        for part in parts:
            seen.append(part)
            yield part

    require_effect_on(CUES, torch.full((41,), 4), 2, reads_last=False, controls=False, documents=telling)
    assert len(seen) == 11


@pytest.mark.parametrize("cue_tokens", [0, 1, [[5], [6]]], ids=str)
def test_a_control_of_endprompt_passes_and_is_told(cue_tokens, caplog):
    view = EndPrompt(target=64, cue_tokens=cue_tokens)
    check(view, of_lengths(12), False, controls=True)
    assert "trains as view='standard'" in caplog.text
    with pytest.raises(ValueError, match="changes no distance"):
        check(view, of_lengths(12), False, controls=False)


@pytest.mark.parametrize(
    ("objective", "options"),
    [
        ("clm", {"target": 64, "cue_tokens": [[100, 99, 98]]}),
        ("clm", {"target": 12, "cue_tokens": 3}),
        ("self-distill", {"target": 12, "cue_tokens": 3}),
        ("self-distill", {"target": 64, "cue_tokens": 1}),
    ],
    ids=str,
)
def test_the_trainer_refuses_it(objective, options, tmp_path):
    settings = {"view": "endprompt", "view_args": options, "objective": objective, "max_length": 12}
    if options["target"] > 32:
        settings |= {"rescale": "pi", "rescale_args": {"factor": 4.0}}
    with pytest.raises(ValueError, match="changes no distance|can change a prediction"):
        trainer(tmp_path, train_dataset=SAME, **settings)
