"""LinearARD in one command: rescale, distil at the native length, train on at the extended one, export.

Run:  python examples/restore.py --config examples/recipes/restore/llama3_8b_pi4.yaml
      accelerate launch examples/restore.py --config RECIPE.yaml --output_dir other

`rope-patch train` does the same with such a recipe. Stopped, the same command goes on. The result, `OUTPUT_DIR/model`,
loads everywhere without this package.
"""

import sys

from trl_ext.cli.user_errors import run_command
from trl_ext.recipes.restoring import restore_recipe

if __name__ == "__main__":
    sys.exit(run_command("restore.py", restore_recipe))
