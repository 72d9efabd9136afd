"""The registry of objectives: what each owns, what it refuses, and one that somebody else adds."""

from dataclasses import dataclass, fields

import pytest
import torch
from support.training import documents, logged, trainer

from rope_patch.forward_loss import ForwardLoss, Tape
from rope_patch.views import Uniform
from trl_ext import RecipeParser, RopeSFTConfig
from trl_ext.objectives import OBJECTIVES, Objective, ObjectiveOptions

FIELDS = sorted({name for kind in OBJECTIVES.values() for name in kind.options_class.config_fields})
GIVEN = {
    "cue_weight": 0.5,
    "hidden_args": {"weight": 2.0},
    "kl_weight": 0.5,
    "logit_kl_args": {"weight": 0.1},
    "longce_args": {"cap": 2.0},
    "native_args": {"clm_weight": 0.0},
    "relation_args": {"v": 0.0},
    "restore_every": 2,
    "self_distill_args": {"direction": "forward"},
    "token_weighting": "longce",
}


def test_every_field_of_an_objective_has_a_value_here():
    of_config = {f.name for f in fields(RopeSFTConfig)}
    lacking = [
        f"trl_ext/config.py, RopeSFTConfig: {name}: ... = field(...)" for name in FIELDS if name not in of_config
    ]
    lacking += [f'tests/trl_ext/test_objectives.py, GIVEN: "{name}": a value' for name in FIELDS if name not in GIVEN]
    assert not lacking, "add\n" + "\n".join(lacking)
    assert set(GIVEN) == set(FIELDS)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("name", FIELDS)
def test_a_field_of_another_objective_is_refused(name, objective, tmp_path):
    if name in OBJECTIVES[objective].options_class.config_fields:
        pytest.skip("its own")
    with pytest.raises(ValueError, match=f"{name} belongs to objective='.*, got objective='{objective}'"):
        RopeSFTConfig(output_dir=str(tmp_path), use_cpu=True, objective=objective, **{name: GIVEN[name]})


@pytest.mark.parametrize("name", FIELDS)
def test_an_empty_dict_of_options_is_none(name, tmp_path):
    if not name.endswith("_args"):
        pytest.skip("no dict")
    for objective in OBJECTIVES:
        RopeSFTConfig(output_dir=str(tmp_path), use_cpu=True, objective=objective, **{name: {}})


def test_an_unknown_objective_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match="Unknown objective 'rpsd'. Did you mean 'self-distill'. Known: clm, "):
        RopeSFTConfig(output_dir=str(tmp_path), use_cpu=True, objective="rpsd")


@pytest.mark.parametrize("field", ["relation_args", "logit_kl_args"])
def test_options_of_relations_go_with_steps_that_distil_them(field, tmp_path):
    options = {"objective": "self-distill", "view": "skip", field: GIVEN[field]}
    with pytest.raises(ValueError, match=f"{field} belongs to objective='relation-distill', or to restore_every"):
        RopeSFTConfig(output_dir=str(tmp_path), use_cpu=True, **options)
    RopeSFTConfig(output_dir=str(tmp_path), use_cpu=True, restore_every=2, **options)


class SquaredStates(ForwardLoss):
    """Sum of squares of last hidden states."""

    def _steps(self, tape, call):
        output = yield None
        tape.result = output.last_hidden_state[tape.valid].square().sum()


@dataclass(frozen=True, kw_only=True)
class SquaredOptions(ObjectiveOptions):
    @classmethod
    def of(cls, args):
        return cls()

    def record(self):
        return {}


@dataclass(frozen=True, kw_only=True)
class ScaledOptions(SquaredOptions):
    config_fields = ("objective_args", "no_field_of_ours")

    scale: float

    @classmethod
    def of(cls, args):
        return cls(scale=(args.objective_args or {}).get("scale", 1.0))


class SquaredObjective(Objective):
    help = "the mean square of last hidden states"
    options_class = SquaredOptions

    def _make_loss(self, model):
        return SquaredStates(model)

    def _tape(self, inputs, read, counts):
        return Tape(read, torch.zeros_like(inputs["input_ids"]))

    def _combine(self, tape, counts, batch_counts):
        return tape.result / counts["tokens"], {"square": (tape.result, batch_counts["tokens"])}


def test_an_objective_of_somebody_else_trains_once_it_is_registered(tmp_path, monkeypatch):
    monkeypatch.setitem(OBJECTIVES, "squares", SquaredObjective)
    held_out = documents(3, seed=5)
    options = {"view": "skip", "view_args": {"skip": Uniform(1, 20)}, "train_dataset": documents(4), "max_steps": 3}
    run = trainer(tmp_path, objective="squares", eval_dataset=held_out, per_device_eval_batch_size=1, **options)
    run.train()
    losses = [entry["loss"] for entry in logged(run, "loss")]
    assert losses[2] < losses[0]
    assert logged(run, "square")[0]["square"] == pytest.approx(losses[0], rel=1e-5)
    squares = [run.model.model(torch.tensor([ids])).last_hidden_state.square().sum() for ids in held_out["input_ids"]]
    at_true_positions = sum(squares).item() / sum(map(len, held_out["input_ids"]))
    assert run.evaluate()["eval_square"] == pytest.approx(at_true_positions, rel=1e-5)


class ScaledObjective(SquaredObjective):
    options_class = ScaledOptions

    def _combine(self, tape, counts, batch_counts):
        loss, parts = super()._combine(tape, counts, batch_counts)
        return self.options.scale * loss, parts


def test_an_objective_of_somebody_else_has_options_and_breaks_no_other_run(tmp_path, monkeypatch):
    monkeypatch.setitem(OBJECTIVES, "scaled", ScaledObjective)
    for objective in OBJECTIVES:
        RopeSFTConfig(output_dir=str(tmp_path), use_cpu=True, objective=objective)
    with pytest.raises(ValueError, match="objective_args belongs to objective='scaled', got objective='clm'"):
        RopeSFTConfig(output_dir=str(tmp_path), use_cpu=True, objective_args={"scale": 2.0})
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("{output_dir: out, use_cpu: true, objective: scaled, objective_args: {scale: 2.0}}")
    (args,) = RecipeParser((RopeSFTConfig,)).parse_args_and_config(["--config", str(recipe)])
    assert args.objective_options.scale == 2.0
    losses = []
    for given in ({}, {"objective_args": {"scale": 2.0}}):
        run = trainer(tmp_path, objective="scaled", train_dataset=documents(4), max_steps=1, **given)
        run.train()
        losses.append(logged(run, "loss")[0]["loss"])
    assert losses[1] == pytest.approx(2 * losses[0], rel=1e-5)


def test_options_that_no_objective_reads_are_refused(tmp_path):
    with pytest.raises(ValueError, match="objective_args belongs to objective=one that is installed and reads it, got"):
        RopeSFTConfig(output_dir=str(tmp_path), use_cpu=True, objective_args={"scale": 2.0})
