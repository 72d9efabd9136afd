"""A teacher that would be no teacher, and losses that would misread their rows, stop before the first step."""

import pytest
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from support.marks import needs_own_adapters
from support.tiny import tiny
from support.training import documents, trainer
from transformers.integrations.neftune import activate_neftune

PI = {"rescale": "pi", "rescale_args": {"factor": 4.0}}
NATIVE = {
    "relation": {**PI, "objective": "relation-distill"},
    "hidden": {**PI, "objective": "hidden-distill"},
    "native": {**PI, "objective": "native-distill"},
    "self-distill": {**PI, "objective": "self-distill", "view": "skip", "objective_args": {"teacher": "native"}},
    "restore": {**PI, "objective": "self-distill", "view": "skip", "objective_args": {"restore": {"every": 2}}},
}
LONGCE = {"objective_args": {"longce": {"short_context": 4, "stride": 2}}}
OWN_LOSS = {**NATIVE, "self": {"objective": "self-distill", "view": "skip"}, "longce": LONGCE}
LORA = {"r": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}


@pytest.mark.parametrize("init", ["pissa", "olora"])
@pytest.mark.parametrize("objective", NATIVE)
def test_adapters_that_change_the_base_weights(objective, init, tmp_path):
    with pytest.raises(ValueError, match=f"init_lora_weights='{init}' changes the base weights"):
        trainer(
            tmp_path,
            peft_config=LoraConfig(**LORA, init_lora_weights=init),
            train_dataset=documents(2),
            **NATIVE[objective],
        )


def test_the_model_itself_as_teacher_may_have_such_adapters(tmp_path):
    peft_config = LoraConfig(**LORA, init_lora_weights="pissa")
    trainer(tmp_path, peft_config=peft_config, train_dataset=documents(2), max_steps=1, **OWN_LOSS["self"]).train()


@pytest.mark.parametrize("config", [PromptTuningConfig, PrefixTuningConfig])
@pytest.mark.parametrize("objective", OWN_LOSS)
def test_prompts(objective, config, tmp_path):
    peft_config = config(task_type="CAUSAL_LM", num_virtual_tokens=3)
    with pytest.raises(ValueError, match="adapter 'default' learns prompts"):
        trainer(tmp_path, peft_config=peft_config, train_dataset=documents(2), **OWN_LOSS[objective])


@pytest.mark.parametrize("objective", NATIVE)
def test_merged_adapters(objective, tmp_path):
    model = get_peft_model(tiny(), LoraConfig(**LORA, init_lora_weights=False))
    model.merge_adapter()
    with pytest.raises(ValueError, match="adapters are merged into the weights"):
        trainer(tmp_path, model=model, train_dataset=documents(2), **NATIVE[objective])


@needs_own_adapters
def test_adapters_without_a_wrapper_are_switched_off(tmp_path):
    model = tiny()
    model.add_adapter(LoraConfig(**LORA, init_lora_weights=False))
    run = trainer(tmp_path, model=model, train_dataset=documents(2), **NATIVE["relation"])
    assert type(run._objective.teacher).__name__ == "SharedTeacher"


@pytest.mark.parametrize("objective", OWN_LOSS)
def test_embeddings_that_are_noised_already(objective, tmp_path):
    model = tiny()
    activate_neftune(model, 5.0)
    with pytest.raises(ValueError, match="NEFTune, neftune_noise_alpha=5.0"):
        trainer(tmp_path, model=model, train_dataset=documents(2), **OWN_LOSS[objective])
