"""A run is resumed with the adapters that it trained, or not at all."""

import json

import pytest
from peft import LoraConfig, get_peft_model
from support.tiny import tiny
from support.training import trainer

from trl_ext.runs.same_adapters import require_same_adapters

BEFORE = {"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}


def run_of(folder, peft=None, **options):
    return trainer(
        folder, peft_config=None if peft is None else LoraConfig(**peft), save_strategy="steps", save_steps=1, **options
    )


def with_adapter(**options):
    return get_peft_model(tiny(), LoraConfig(**{**BEFORE, **options}))


@pytest.fixture
def checkpoint(tmp_path):
    with_adapter().save_pretrained(tmp_path)
    return tmp_path


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
    with pytest.raises(ValueError, match="Give the values that it was trained with, or start a new run") as error:
        require_same_adapters(with_adapter(**changed), str(checkpoint))
    first, _, second = str(error.value).partition(", and this run has ")
    assert "the adapter 'default' in " in first and was in first and now in second


def test_the_same_adapters_written_in_another_way_go_on(checkpoint, caplog):
    same = with_adapter(target_modules={"v_proj", "q_proj"}, init_lora_weights="gaussian")
    require_same_adapters(same, str(checkpoint))
    assert not caplog.text


def test_another_base_model_is_warned_of_and_an_option_of_another_version_of_peft_passes(checkpoint, caplog):
    file = checkpoint / "adapter_config.json"
    config = {**json.loads(file.read_text()), "base_model_name_or_path": "other/model", "of_tomorrow": 3}
    del config["use_rslora"]
    file.write_text(json.dumps(config))
    require_same_adapters(with_adapter(), str(checkpoint))
    assert "was trained on other/model, and this run has " in caplog.text


def test_adapters_and_whole_weights_are_not_resumed_as_each_other(tmp_path):
    """Nor is an adapter of another rank. Without an optimizer beside the weights nothing else would stop."""
    for folder, peft in (("whole", None), ("adapter", BEFORE)):
        run_of(tmp_path / folder, peft, max_steps=1, save_only_model=True).train()
    for folder, peft, message in (
        ("whole", BEFORE, "has no adapter_config.json, and this run trains the adapter 'default'"),
        ("adapter", None, "is of a run that trained an adapter, and this run trains none"),
        ("adapter", {**BEFORE, "r": 2}, "has r=4, and this run has r=2"),
    ):
        run = run_of(tmp_path / "new", peft, max_steps=2)
        with pytest.raises(ValueError, match=message):
            run.train(resume_from_checkpoint=str(tmp_path / folder / "checkpoint-1"))
        assert run.state.global_step == 0
