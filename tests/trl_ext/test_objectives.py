"""Objectives in the config: the options of each, what is refused, and one that somebody else adds."""

import json
import sys
from pathlib import Path

import pytest
import torch
import yaml
from support.packages import installed
from support.training import documents, logged, trainer

from rope_patch.views import Uniform
from trl_ext import RecipeParser, RopeSFTConfig, cli
from trl_ext.objectives import OBJECTIVES

PI = {"rescale": "pi", "rescale_args": {"factor": 2.0}}
CUE = {"view": "endprompt", "view_args": {"cue_tokens": 2, "target": 128}}
SHORT = {"short_context": 6, "stride": 4}
NAN, INF = float("nan"), float("inf")

OPTIONS_REFUSED = [
    ("clm", {"kl_weight": 2.0}, "Unknown option 'kl_weight' of objective_args of 'clm'.* Known: cue_weight, longce"),
    (
        "clm",
        {"longce": "short"},
        "longce in objective_args of 'clm' must be a mapping of options, or None, got 'short'",
    ),
    ("clm", {"longce": {"cap": True}}, "longce in objective_args of 'clm': cap must be a number above 0, got True"),
    ("clm", {"longce": {"stride": 4.0}}, "stride must be an integer of at least 1"),
    ("clm", {"longce": {"width": 3}}, "Unknown option 'width' of longce in objective_args of 'clm'. Known: cap, short"),
    (
        "clm",
        {"longce": {"short_context": 64}},
        "got 64 and documents of at most 64 .* leave longce out of objective_args",
    ),
    ("clm", {"cue_weight": -0.1}, "objective_args of 'clm': cue_weight must be a number of at least 0, got -0.1"),
    ("clm", {"cue_weight": 0.5}, "cue_weight of objective_args weighs the tokens of view='endprompt'"),
    ("self-distill", {"depth": 2}, "Unknown option 'depth' of objective_args of 'self-distill'. Known: control, direc"),
    ("self-distill", {"kl_weight": -1.0}, "kl_weight must be a number of at least 0, got -1.0"),
    ("self-distill", {"kl_weight": True}, "kl_weight must be a number of at least 0, got True"),
    ("self-distill", {"kl_weight": NAN}, "kl_weight must be a number of at least 0, got nan"),
    ("self-distill", {"kl_weight": INF}, "kl_weight must be a number of at least 0, got inf"),
    ("self-distill", {"view_clm": NAN}, "view_clm must be a number of at least 0, got nan"),
    ("self-distill", {"kl_top": "0.5"}, "kl_top must be a number above 0 and below 1, got '0.5'"),
    (
        "self-distill",
        {"kl_longce": {"cap": 0.0}},
        "kl_longce in objective_args of 'self-distill': cap must be a number",
    ),
    ("self-distill", {"direction": "both"}, "direction must be one of"),
    ("self-distill", {"passes": "one"}, "objective_args of 'self-distill': passes must be one of"),
    ("self-distill", {"passes": "sequential", "kl_weight": 0.0}, "need two forwards, and training runs one"),
    ("self-distill", {"passes": "two", "control": {"kind": "dropout"}}, "a control always runs two passes"),
    ("self-distill", {"max_copies": 1.5}, "max_copies must be a number above 0 and below 1, got 1.5"),
    ("self-distill", {"max_copies": 0.5, "kl_weight": 0.0}, "need two forwards, and training runs one"),
    ("self-distill", {"max_copies": 0.5, "control": {"kind": "dropout"}}, "leave out passes, max_copies"),
    ("self-distill", {"teacher": "other"}, "objective_args of 'self-distill': teacher must be one of"),
    ("self-distill", {"teacher": "native", "control": {"kind": "dropout"}}, "a control always runs two passes"),
    (
        "self-distill",
        {"control": {"kind": "weights"}},
        "control in objective_args of 'self-distill': kind must be one of",
    ),
    ("self-distill", {"control": {"strength": 2}}, "control in objective_args of 'self-distill' needs kind, got"),
    (
        "self-distill",
        {"control": {"kind": "dropout", "strength": True}},
        "strength of 'dropout' must be a number above 0",
    ),
    ("self-distill", {"restore": {"every": 1}}, "every must be an integer of at least 2, got 1"),
    ("self-distill", {"restore": {"v": 0.5}}, "restore in objective_args of 'self-distill' needs every, got"),
    (
        "self-distill",
        {"restore": {"every": 2, "logit_kl": {"last": 4}}},
        "logit_kl in restore in objective_args of .* need",
    ),
    ("relation-distill", {"w": 1.0}, "Unknown option 'w' of objective_args of 'relation-distill'. Known: attention"),
    ("relation-distill", {"q": -1}, "weight of 'q' must be"),
    ("relation-distill", {"layers": 3}, "objective_args of 'relation-distill': layers must be a list"),
    (
        "relation-distill",
        {"logit_kl": {"last": 4}},
        "logit_kl in objective_args of 'relation-distill' needs weight, got",
    ),
    ("hidden-distill", {"weight": 0.0}, "objective_args of 'hidden-distill': weight must be a number above 0"),
    ("native-distill", {"kl_weight": 1.0}, "Unknown option 'kl_weight' of objective_args of 'native-distill'"),
    (
        "native-distill",
        {"weight": -1},
        "objective_args of 'native-distill': weight must be a number of at least 0, got -1",
    ),
    ("native-distill", "{'weight': 1}", "objective_args must be a dict, or a JSON object"),
]


@pytest.mark.parametrize(("objective", "options", "message"), OPTIONS_REFUSED, ids=str)
def test_options_that_an_objective_does_not_take_are_refused(objective, options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        RopeSFTConfig(
            output_dir=str(tmp_path), use_cpu=True, max_length=64, objective=objective, objective_args=options, **PI
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"objective": "distill"},
            "Unknown objective 'distill'. Did you mean '.*-distill'. Known: clm, hidden-distill, ",
        ),
        ({"objective": "rpsd"}, "Unknown objective 'rpsd'. Did you mean 'self-distill'. Known: clm, "),
        ({"trainable": "q"}, "trainable must be 'all' or 'qkv', got 'q'"),
        ({"objective": "self-distill", "neftune_noise_alpha": 5.0}, "neftune_noise_alpha goes with TRL's own loss"),
        ({"objective": "hidden-distill", "neftune_noise_alpha": 5.0}, "neftune_noise_alpha goes with TRL's own loss"),
        ({"objective_args": {"longce": SHORT}, "neftune_noise_alpha": 5.0}, "goes with TRL's own loss"),
        (
            {**CUE, "objective_args": {"cue_weight": 0.5}, "neftune_noise_alpha": 5.0},
            "objective='clm' without objective_args, got .* objective_args={'cue_weight': 0.5}. Leave it out",
        ),
        (
            {"objective": "self-distill", "label_smoothing_factor": 0.1},
            "label_smoothing_factor goes with TRL's own loss",
        ),
        (
            {"objective_args": {"longce": SHORT}, "loss_type": "dft"},
            "loss_type='dft' and longce of .* both weigh tokens",
        ),
        (
            {"objective": "relation-distill", "loss_type": "dft"},
            "loss_type='dft' weighs the tokens of a next-token loss, and that of objective 'relation-distill' is none",
        ),
    ],
    ids=str,
)
def test_objectives_that_do_not_go_with_the_rest_of_a_config_are_refused(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        RopeSFTConfig(output_dir=str(tmp_path), use_cpu=True, max_length=64, **{**PI, **options})


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_an_objective_has_defaults_for_all_of_its_options(objective, tmp_path):
    for options in (None, {}, "{}"):
        RopeSFTConfig(output_dir=str(tmp_path), use_cpu=True, objective=objective, objective_args=options)


@pytest.fixture
def somebody_elses(tmp_path):
    code = Path(__file__).parents[1].joinpath("support/scaled_states.py").read_text()
    with installed(tmp_path / "site", "of_scaled_states", code, objectives=["scaled-states"]):
        yield


def test_an_objective_of_somebody_else_trains_once_it_is_named(tmp_path, somebody_elses):
    RopeSFTConfig(output_dir=str(tmp_path), use_cpu=True)
    assert "of_scaled_states" not in sys.modules
    held_out = documents(3, seed=5)
    options = {"view": "skip", "view_args": {"skip": Uniform(1, 20)}, "train_dataset": documents(4), "max_steps": 3}
    run = trainer(tmp_path, objective="scaled-states", eval_dataset=held_out, per_device_eval_batch_size=1, **options)
    run.train()
    losses = [entry["loss"] for entry in logged(run, "loss")]
    assert losses[2] < losses[0]
    assert logged(run, "square")[0]["square"] == pytest.approx(losses[0], rel=1e-5)
    squares = [run.model.model(torch.tensor([ids])).last_hidden_state.square().sum() for ids in held_out["input_ids"]]
    at_true_positions = sum(squares).item() / sum(map(len, held_out["input_ids"]))
    assert run.evaluate()["eval_square"] == pytest.approx(at_true_positions, rel=1e-5)


def test_options_of_somebody_else_are_in_recipe_record_and_resuming(tmp_path, somebody_elses):
    given = {"objective": "scaled-states", "objective_args": {"scale": {"factor": 2.0}}}
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({"output_dir": "out", "use_cpu": True, **given}))
    (args,) = RecipeParser((RopeSFTConfig,)).parse_args_and_config(["--config", str(recipe)])
    assert args.objective_options.scale.factor == 2
    run = trainer(tmp_path, train_dataset=documents(8), max_steps=1, save_strategy="steps", save_steps=1, **given)
    run.train()
    (entry,) = logged(run, "loss", "square")
    assert entry["loss"] == pytest.approx(2 * entry["square"], rel=1e-5)
    record = json.loads((tmp_path / "checkpoint-1/rope_patch_training.json").read_text())
    assert record["objective_args"] == {"scale": {"factor": 2.0}}
    resumed = trainer(tmp_path, train_dataset=documents(8), max_steps=2, **given)
    resumed.train(resume_from_checkpoint=True)
    first, second = logged(resumed, "loss", "square")
    assert first == entry and second["loss"] == pytest.approx(2 * second["square"], rel=1e-5)
    given["objective_args"] = {"scale": {"factor": 3.0}}
    with pytest.raises(
        ValueError, match=r"trained with objective_args.scale.factor=2.0, and this run has .*factor=3.0"
    ):
        trainer(tmp_path, train_dataset=documents(8), max_steps=2, **given).train(resume_from_checkpoint=True)


def test_an_objective_of_somebody_else_is_explained(somebody_elses, capsys):
    assert cli.main(["methods", "scaled-states"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "scaled-states, an objective loss = factor" in told and "Take it in tests." in told
    assert "scale (default None): what multiplies the loss; None is 1." in told
    with pytest.raises(ValueError, match="Unknown option 'scal' of objective_args of 'scaled-states'"):
        RopeSFTConfig(output_dir="out", use_cpu=True, objective="scaled-states", objective_args={"scal": 1})
