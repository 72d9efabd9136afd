"""A view that can change nothing that is learned from the documents of a run is refused before the run."""

import pytest
import torch
from datasets import Dataset
from support.training import documents, trainer

from rope_patch.views import Compose, Cyclic, EndPrompt, Mix, PerLayer, PosAug, PoSE, Skip, Standard
from trl_ext.view_effect import require_effect_on

SAME = Dataset.from_list([{"input_ids": row["input_ids"][:12]} for row in documents(8)])  # 12 tokens each

# view, lengths, whether the loss reads what the last token sees
NOTHING = {
    "one token of cue": (EndPrompt(target=64, cue_tokens=1), [12, 20], False),
    "cues of one token": (EndPrompt(target=64, cue_tokens=1, placement="random"), [12], False),
    "as long as the target": (EndPrompt(target=12, cue_tokens=3), [12], True),
    "a split at the last token": (Skip(split=11, skip=5), [12], False),
    "skips that cancel": (Compose([Skip(split=5, skip=30), Skip(split=35, skip=-30)]), [12, 40], True),
    "factors that cancel": (Compose([PosAug(low=0.5, high=0.5), PosAug(low=2.0, high=2.0)]), [12, 900], True),
    "turns that cancel": (Compose([Cyclic(shift=6), Cyclic(shift=6)]), [12], True),
    "by layer": (PerLayer(EndPrompt(target=12, cue_tokens=3), "top"), [12], True),
    "one token": (Skip(), [1], True),
    "one view of a mix": (Mix([Skip(max_skip=9), EndPrompt(target=12, cue_tokens=3)]), [12], True),
}
SOMETHING = {
    "one token of cue, which the loss reads": (EndPrompt(target=64, cue_tokens=1), [12, 20], True),
    "cues as tokens": (EndPrompt(target=64, cue_tokens=[[5], [6, 7]]), [12], False),
    "a few documents": (Skip(split=5000, skip=1), [12] * 99 + [5002], False),
    "short ones": (EndPrompt(target=1000, cue_tokens=2), [1000] * 99 + [12], False),
    "turns that do not": (Compose([Cyclic(shift=6), Cyclic(shift=6)]), [12, 13], True),
    "drawn": (Skip(), [3], False),
    "pose": (PoSE(target=64), [12], False),
    "a mix that rarely moves": (Mix([Standard(), Skip(split=5, skip=9)], [0.999, 0.001]), [12], False),
}  # fmt: skip


@pytest.mark.parametrize("case", NOTHING)
def test_a_view_without_effect_is_refused(case):
    view, lengths, reads_last = NOTHING[case]
    with pytest.raises(ValueError, match="changes no distance between tokens in documents of"):
        require_effect_on(view, torch.tensor(lengths), 2, reads_last=reads_last, controls=False)


@pytest.mark.parametrize("case", SOMETHING)
def test_a_view_with_an_effect_passes(case):
    view, lengths, reads_last = SOMETHING[case]
    require_effect_on(view, torch.tensor(lengths), 2, reads_last=reads_last, controls=False)


@pytest.mark.parametrize("cue_tokens", [0, 1])
def test_a_control_of_endprompt_passes_and_is_told(cue_tokens, caplog):
    view = EndPrompt(target=64, cue_tokens=cue_tokens)
    require_effect_on(view, torch.tensor([12]), 2, reads_last=False, controls=True)
    assert "trains as view='standard'" in caplog.text
    with pytest.raises(ValueError, match="changes no distance"):
        require_effect_on(view, torch.tensor([12]), 2, reads_last=False, controls=False)


@pytest.mark.parametrize(
    ("objective", "options"),
    [
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
