"""The count of tokens that is logged goes on where a run was resumed."""

import json

import pytest
from support import training
from support.tiny import tiny

from rope_patch.views import Uniform
from trl_ext.trainer.token_count import tokens_until


@pytest.mark.parametrize("objective", ["clm", "self-distill"])
def test_a_resumed_run_counts_on(objective, tmp_path):
    options = {"view": "skip", "view_args": {"skip": Uniform(1, 20)}, "logging_steps": 3}
    if objective == "self-distill":
        options |= {"objective": objective}

    def counts(run):
        return [(entry["step"], entry["num_tokens"]) for entry in run.state.log_history if "num_tokens" in entry]

    whole = training.trainer(
        tmp_path / "run", model=tiny(), max_steps=4, save_strategy="steps", save_steps=2, **options
    )
    whole.train()
    resumed = training.trainer(tmp_path / "other", model=tiny(), max_steps=4, **options)
    checkpoint = tmp_path / "run" / "checkpoint-2"
    assert tokens_until(checkpoint) > 0, "nothing was logged before it"
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert counts(resumed) == counts(whole) != []


def test_a_checkpoint_without_the_count_goes_on_from_the_last_log(tmp_path):
    assert tokens_until(tmp_path) == 0
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": [{"num_tokens": 7.0}, {"loss": 1.0}]}))
    assert tokens_until(tmp_path) == 7
