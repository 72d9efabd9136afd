"""The plugin for axolotl, under a stand-in for the two classes of axolotl that it derives from."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import yaml
from pydantic import ValidationError
from support.tiny import tiny, tokens
from transformers import Trainer

from rope_patch import patch_model
from rope_patch.losses import ViewConsistency
from rope_patch.losses.in_trainers import SelfDistillSteps
from rope_patch.views import Skip, Uniform

YARN = {"rescale": "yarn", "rescale_args": {"factor": 4.0}}
SKIP = {"view": "skip", "view_args": {"skip": {"law": "uniform", "low": 1, "high": 64}}, "view_seed": 3}
DISTILL = {"objective": "self-distill", "objective_args": {"kl_weight": 0.5}}


class Config(dict):
    """As axolotl's: a dictionary whose missing keys are None."""

    def __missing__(self, key):
        return None

    def to_dict(self):
        return dict(self)


@pytest.fixture
def axolotl(monkeypatch):
    """The module, as axolotl imports it."""
    for name, members in {
        "axolotl": {},
        "axolotl.integrations": {},
        "axolotl.integrations.base": {"BasePlugin": type("BasePlugin", (), {})},
        "axolotl.core": {},
        "axolotl.core.trainers": {"AxolotlTrainer": Trainer},
    }.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "rope_patch.axolotl", raising=False)
    yield importlib.import_module("rope_patch.axolotl")
    monkeypatch.delitem(sys.modules, "rope_patch.axolotl")


def config(axolotl, **options):
    """What axolotl's YAML becomes: checked, with defaults, without what is None."""
    checked = axolotl.RopePatchArgs(rope_patch=options).model_dump(exclude_none=True)
    return Config(rope_patch=Config(checked["rope_patch"]))


@pytest.mark.parametrize("options", [YARN, SKIP, {**YARN, **SKIP}], ids=["rescaling", "view", "both"])
def test_a_model_is_patched_as_the_yaml_says(options, axolotl):
    cfg, ids = config(axolotl, **options), tokens(2, 40)
    model, right = tiny().train(), tiny().train()
    axolotl.RopePatchPlugin().post_model_build(cfg, model)
    if "rescale" in options:
        patch_model(right, "yarn", factor=4.0)
    if "view" in options:
        patch_model(right, "skip", skip=Uniform(1, 64), seed=3)
    assert torch.equal(model(ids).logits, right(ids).logits)
    assert not torch.equal(model(ids).logits, tiny().train()(ids).logits)
    assert model.config.rope_parameters == right.config.rope_parameters
    assert axolotl.RopePatchPlugin().get_trainer_cls(cfg) is None


def test_the_example_asks_for_what_there_is(axolotl):
    example = yaml.safe_load((Path(__file__).parents[2] / "examples" / "other_trainers" / "axolotl.yaml").read_text())
    plugin = axolotl.RopePatchPlugin()
    assert example["plugins"] == [f"{axolotl.__name__}.{type(plugin).__name__}"]
    model = tiny()
    plugin.post_model_build(config(axolotl, **example["rope_patch"]), model)
    assert model.config.rope_parameters["factor"] == 4.0


def test_self_distillation_takes_a_trainer_of_its_own_and_draws_the_view_itself(axolotl):
    cfg, plugin, ids = config(axolotl, **SKIP, **DISTILL), axolotl.RopePatchPlugin(), tokens(2, 40)
    model = tiny().train()
    plugin.post_model_build(cfg, model)
    assert torch.equal(model(ids).logits, tiny().train()(ids).logits)
    trainer = plugin.get_trainer_cls(cfg)
    assert issubclass(trainer, SelfDistillSteps) and issubclass(trainer, Trainer)
    assert trainer.draws == {
        "view": Skip(skip=Uniform(1, 64)), "seed": 3, "consistency": ViewConsistency(kl_weight=0.5),
    }  # fmt: skip


def test_a_rescaled_model_is_merged_with_its_config(axolotl):
    plugin, cfg = axolotl.RopePatchPlugin(), Config(rope_patch=YARN)
    plugin.register(cfg)
    assert cfg["merge_method"] == "legacy"
    with pytest.raises(ValueError, match="merge_method must be legacy"):
        plugin.register(Config(rope_patch=YARN, merge_method="memory_efficient"))
    plugin.register(view := Config(rope_patch=SKIP))
    assert view["merge_method"] is None


def test_preferences_are_not_distilled(axolotl):
    cfg = Config(rl="dpo", **config(axolotl, **SKIP, **DISTILL))
    with pytest.raises(ValueError, match="for supervised fine-tuning"):
        axolotl.RopePatchPlugin().get_trainer_cls(cfg)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "needs a rescale, a view or both"),
        ({"rescale": "yarm"}, "Did you mean 'yarn'"),
        ({"rescale_args": {"factor": 4.0}}, "rescale_args needs rescale"),
        ({**SKIP, "view_args": {"skips": 3}}, "Did you mean 'skip'"),
        ({**SKIP, "objective": "self_distill"}, "Did you mean 'self-distill'"),
        ({**SKIP, "objective_args": {"kl_weight": 1}}, "objective_args needs objective"),
        ({**SKIP, **DISTILL, "objective_args": {"kl_wait": 1}}, "Did you mean 'kl_weight'"),
        ({**YARN, **DISTILL}, "needs a view that moves tokens"),
        ({"rescaling": "yarn"}, "Extra inputs are not permitted"),
    ],
)
def test_a_mistake_in_the_yaml_is_told_before_a_model_is_loaded(options, message, axolotl):
    with pytest.raises(ValidationError, match=message):
        config(axolotl, **options)


def test_the_names_that_axolotl_imports_are_there(axolotl):
    assert axolotl.RopePatchPlugin().get_input_args() == "rope_patch.axolotl.RopePatchArgs"
    assert [*axolotl.RopePatchArgs.model_fields] == ["rope_patch"]
