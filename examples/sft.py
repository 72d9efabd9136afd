"""Fine-tune any causal LM with RoPE as a recipe says, on one GPU or several: what `rope-patch train` does.

Run:  python examples/sft.py --config examples/recipes/qwen3_4b_yarn_skip_64k.yaml
      accelerate launch --config_file fsdp2.yaml examples/sft.py --config RECIPE.yaml --learning-rate 1e-5

Every field of RopeSFTConfig, ModelConfig, ScriptArguments and DatasetMixtureConfig is a key of the recipe and a flag of
the command line, which wins. With an adapter, `rope_patch.load_adapter(base_model, output_dir)` loads what is saved.
A run that was stopped goes on with --resume-from-checkpoint OUTPUT_DIR/checkpoint-N, under the same method.
"""

import sys

from trl_ext.cli.user_errors import run_command
from trl_ext.recipes.fine_tuning import fine_tune_recipe

if __name__ == "__main__":
    sys.exit(run_command("sft.py", fine_tune_recipe))
