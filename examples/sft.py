"""Fine-tune any causal LM with RoPE on a rescaled window and a sampled view, on one GPU or several.

Run:  python examples/sft.py --config examples/recipes/qwen3_4b_yarn_skip_64k.yaml
      accelerate launch --config_file fsdp2.yaml examples/sft.py --config RECIPE.yaml --learning_rate 1e-5

Every field of RopeSFTConfig, ModelConfig, ScriptArguments and DatasetMixtureConfig is a key of the recipe and a flag of
the command line, which wins. With an adapter, `rope_patch.load_adapter(base_model, output_dir)` loads what is saved.
A run that was stopped goes on with --resume_from_checkpoint OUTPUT_DIR/checkpoint-N, under the same method.
"""

import sys

from transformers import set_seed
from trl import (
    DatasetMixtureConfig,
    ModelConfig,
    ScriptArguments,
    TrlParser,
    get_dataset,
    get_peft_config,
    get_quantization_config,
)

from rope_patch import describe
from trl_ext import RopeSFTConfig, RopeSFTTrainer, require_known_keys
from trl_ext.cli.user_errors import run_command


def main() -> None:
    parser = TrlParser((ScriptArguments, RopeSFTConfig, ModelConfig, DatasetMixtureConfig))
    require_known_keys(parser)
    script, training, model, data = parser.parse_args_and_config()
    if not data.datasets:
        parser.error("the recipe must name the text to train on under `datasets`")
    training.model_init_kwargs = {
        "revision": model.model_revision,
        "attn_implementation": model.attn_implementation,
        "dtype": model.dtype,
        **(training.model_init_kwargs or {}),
    }
    set_seed(training.seed)  # what test_split_size holds out is drawn: alike on all ranks, and when a run goes on
    dataset = get_dataset(data)
    evaluates = training.eval_strategy != "no"
    if evaluates and script.dataset_test_split not in dataset:
        parser.error(
            f"eval_strategy needs a split {script.dataset_test_split!r} and the text has {', '.join(dataset)}: set "
            "test_split_size to hold a part out, or dataset_test_split"
        )
    trainer = RopeSFTTrainer(
        model=model.model_name_or_path,
        args=training,
        train_dataset=dataset[script.dataset_train_split],
        eval_dataset=dataset[script.dataset_test_split] if evaluates else None,
        quantization_config=get_quantization_config(model),
        peft_config=get_peft_config(model),
    )
    trainer.accelerator.print(describe(trainer.model))
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    trainer.save_model()
    if training.push_to_hub:
        trainer.push_to_hub()


if __name__ == "__main__":
    sys.exit(run_command("sft.py", main))
