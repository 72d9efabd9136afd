"""A run is resumed with the adapters that it trained, or not at all."""

import json

import pytest
from peft import LoraConfig
from support.training import trainer

BEFORE = {"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}


def run_of(folder, peft=None, **options):
    return trainer(
        folder, peft_config=None if peft is None else LoraConfig(**peft), save_strategy="steps", save_steps=1, **options
    )


@pytest.fixture(scope="module", params=[False, True], ids=["with optimizer", "weights alone"])
def checkpoint(request, tmp_path_factory):
    """A folder with a checkpoint of BEFORE, in which no test trains."""
    folder = tmp_path_factory.mktemp("before")
    saved(folder, BEFORE, save_only_model=request.param)
    return folder


def saved(folder, peft=None, **options):
    run_of(folder, peft, max_steps=1, **options).train()


@pytest.mark.parametrize(
    ("changed", "was", "now"),
    [
        ({"lora_alpha": 64}, "lora_alpha=8", "lora_alpha=64"),
        ({"r": 2}, "r=4", "r=2"),
        ({"use_rslora": True}, "use_rslora=False", "use_rslora=True"),
        ({"lora_dropout": 0.1}, "lora_dropout=0.0", "lora_dropout=0.1"),
        (
            {"target_modules": ["q_proj", "k_proj", "v_proj"]},
            "target_modules=['q_proj', 'v_proj']",
            "'k_proj', 'q_proj'",
        ),
        ({"layers_to_transform": [0]}, "layers_to_transform=None", "layers_to_transform=[0]"),
        ({"init_lora_weights": "olora"}, "init_lora_weights=True", "init_lora_weights='olora'"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern='{}'", """rank_pattern='{"q_proj": 2}'"""),
    ],
    ids=lambda case: next(iter(case)) if isinstance(case, dict) else "",
)
def test_other_adapters_are_not_resumed(changed, was, now, checkpoint):
    run = run_of(checkpoint, {**BEFORE, **changed}, max_steps=2)
    with pytest.raises(ValueError, match="Give the values that it was trained with, or start a new run") as error:
        run.train(resume_from_checkpoint=True)
    first, _, second = str(error.value).partition(", and this run has ")
    assert "the adapter 'default' in " in first and was in first and now in second
    assert run.state.global_step == 0


def test_the_same_adapters_said_otherwise_go_on(tmp_path, caplog):
    saved(tmp_path, BEFORE)
    said = {**BEFORE, "target_modules": {"v_proj", "q_proj"}, "init_lora_weights": "gaussian"}
    run = run_of(tmp_path, said, max_steps=2)
    run.train(resume_from_checkpoint=True)
    assert run.state.global_step == 2 and "goes on right only if" not in caplog.text


def test_another_base_model_is_warned_of(tmp_path, caplog):
    saved(tmp_path, BEFORE)
    file = tmp_path / "checkpoint-1" / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": "other/model"}))
    run_of(tmp_path, BEFORE, max_steps=2).train(resume_from_checkpoint=True)
    assert "was trained on other/model, and this run has " in caplog.text


def test_an_option_of_another_version_of_peft_passes(tmp_path):
    saved(tmp_path, BEFORE)
    file = tmp_path / "checkpoint-1" / "adapter_config.json"
    config = json.loads(file.read_text())
    del config["use_rslora"]
    file.write_text(json.dumps({**config, "of_tomorrow": 3}))
    run = run_of(tmp_path, BEFORE, max_steps=2)
    run.train(resume_from_checkpoint=True)
    assert run.state.global_step == 2


@pytest.mark.parametrize("weights_alone", [False, True], ids=["with optimizer", "weights alone"])
def test_adapters_and_whole_weights_are_not_resumed_as_each_other(weights_alone, tmp_path):
    saved(tmp_path / "whole", save_only_model=weights_alone)
    with pytest.raises(ValueError, match="has no adapter_config.json, and this run trains the adapter 'default'"):
        run_of(tmp_path / "whole", BEFORE, max_steps=2).train(resume_from_checkpoint=True)
    saved(tmp_path / "adapter", BEFORE, save_only_model=weights_alone)
    checkpoint = tmp_path / "adapter" / "checkpoint-1"
    with pytest.raises(ValueError, match="is of a run that trained an adapter, and this run trains none"):
        run_of(tmp_path / "else", max_steps=2).train(resume_from_checkpoint=str(checkpoint))
