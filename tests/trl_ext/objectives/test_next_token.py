"""objective="clm" in the trainer with weights of tokens, which self-distillation takes too."""

import pytest
from support.training import documents, logged, trainer

from rope_patch.views import Uniform

SELF = {"objective": "self-distill", "view": "skip", "view_args": {"skip": Uniform(1, 40)}}


@pytest.mark.parametrize("objective", [SELF, {"objective": "clm", "view": "posaug"}], ids=["self-distill", "clm"])
def test_longce_weighs_tokens_and_evaluation_does_not(objective, tmp_path):
    data = documents(4)
    options = {"train_dataset": data, "eval_dataset": data, "max_steps": 2, "learning_rate": 0.0, **objective}
    weighted = trainer(tmp_path, **options, objective_args={"longce": {"short_context": 6, "stride": 4, "cap": 3.0}})
    weighted.train()
    plain = trainer(tmp_path, **options)
    plain.train()
    for mine, theirs in zip(logged(weighted, "loss", "token_weight"), logged(plain, "loss"), strict=True):
        assert mine["loss"] != pytest.approx(theirs["loss"], rel=1e-3) and 0 < mine["token_weight"] <= 3
    assert weighted.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], rel=2e-2)
