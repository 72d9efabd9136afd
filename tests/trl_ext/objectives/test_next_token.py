"""objective="clm" in the trainer with weights of tokens."""

import pytest
from support.training import documents, logged, trainer


def test_longce_weighs_tokens_and_evaluation_does_not(tmp_path):
    data = documents(4)
    options = {"train_dataset": data, "eval_dataset": data, "max_steps": 1, "learning_rate": 0.0, "view": "posaug"}
    weighted = trainer(tmp_path, **options, objective_args={"longce": {"short_context": 6, "stride": 4, "cap": 3.0}})
    weighted.train()
    plain = trainer(tmp_path, **options)
    plain.train()
    for mine, theirs in zip(logged(weighted, "loss", "token_weight"), logged(plain, "loss"), strict=True):
        assert mine["loss"] != pytest.approx(theirs["loss"], rel=1e-3) and 0 < mine["token_weight"] <= 3
    assert weighted.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], rel=2e-2)
