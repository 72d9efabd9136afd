"""`rope-patch demo`: `extend` on a model and texts that are installed already."""

import argparse
import os
from pathlib import Path
from typing import Any

from ..demo.settings import ROWS_PER_STEP, TO
from ..engines.device import choose_device
from .extend import add_options

_NOT_SAID = ("rows_per_step", "facts", "lora_rank", "seed", "held_out", "lengths")
"""Options with a default in `extend`, of which the demo must know whether they were given."""


def add_commands(commands: Any) -> None:
    """Add `demo` to the subparsers."""
    demo = commands.add_parser(
        "demo",
        help="extend a small model that is installed, in minutes, and see what was won and lost",
        description="Take SmolLM2-135M-Instruct from its window of 8192 tokens to a longer one, by `rope-patch extend` "
        "with fewer rows and prompts: measure, train, export, measure again. Model and texts, the sources of Python's "
        "standard library, are installed; nothing is downloaded. A run that was stopped goes on with the same command.",
    )
    demo.set_defaults(run=run_demo)
    demo.add_argument(
        "--output",
        dest="output_dir",
        metavar="DIR",
        type=Path,
        default=Path("rope-patch-demo"),
        help="folder of everything that is made; default: %(default)s",
    )
    demo.add_argument(
        "--to",
        type=int,
        metavar="N",
        help=f"the window that you want, in tokens; default: {TO['cuda']}, on a CPU {TO['cpu']}",
    )
    add_options(demo, f"8, on a CPU {ROWS_PER_STEP['cpu']}")
    demo.set_defaults(**dict.fromkeys(_NOT_SAID))


def run_demo(args: argparse.Namespace) -> int:
    """Run the demo, and print what was won and lost, and what to type next."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # all that is needed is installed
    try:
        import torch

        from ..extension.messages import others_quiet

        with others_quiet():  # packages that are imported say what they miss
            from ..demo.run import next_command, run
        from ..extension.options import ExtendOptions
    except ModuleNotFoundError as error:
        raise ImportError(f"the demo needs {error.name}: pip install 'rope-patch[demo]'.") from error
    device = choose_device(args.device, torch.cuda.is_available())
    names = ExtendOptions.__dataclass_fields__.keys() - {"device"}
    given = {name: value for name, value in vars(args).items() if name in names and value is not None}
    given |= {name: tuple(given[name]) for name in ("held_out", "lengths") if name in given}
    done = run(args.output_dir, device, given)
    print(f"\n{done}\n\nNext, with long texts of your own: {next_command(args.output_dir)}")
    return 0
