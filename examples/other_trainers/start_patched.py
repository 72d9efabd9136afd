"""Start a program that loads its model by name, and patch what it loads.

Run:  python examples/other_trainers/start_patched.py trl.scripts.sft --config sft.yaml

In place of `python` several GPUs take `accelerate launch` or `torchrun --nproc-per-node 8`.
"""

import runpy
import sys

from rope_patch import patch_on_load

patch_on_load("yarn", factor=4.0)  # the one line

sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
