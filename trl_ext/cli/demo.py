"""`rope-patch demo`: `extend` on a model and texts that are already installed."""

import argparse
import os
from pathlib import Path
from typing import Any

from ..demo.settings import FOLDER, ROWS_PER_STEP, TO
from ..engines.device import choose_device
from .extend import add_options

# options with a default in `extend`; the demo has defaults of its own and must see which ones the user has set
_UNSET = ("rows_per_step", "facts", "lora_rank", "seed", "held_out", "lengths", "untrained")


def add_commands(commands: Any) -> None:
    """Add `demo` to the subparsers."""
    demo = commands.add_parser(
        "demo",
        help="extend the context window of a small model within minutes",
        description="Extend the context window of SmolLM2-135M-Instruct, which is 8192 tokens. The demo runs "
        "`rope-patch extend` with fewer training rows and prompts: it measures the model as it came and under RoPE "
        "scaling alone, trains, exports and measures again. "
        "The model comes with a Python package, and the texts are the sources of Python's standard library: nothing "
        "is downloaded. The same command resumes a stopped run.",
    )
    demo.set_defaults(run=run_demo)
    demo.add_argument(
        "--output",
        dest="output_dir",
        metavar="DIR",
        type=Path,
        default=FOLDER,
        help="folder for all results; default: %(default)s",
    )
    demo.add_argument(
        "--to",
        type=int,
        metavar="N",
        help=f"target context window, in tokens; default: {TO['cuda']}, on a CPU {TO['cpu']}",
    )
    add_options(demo, f"8, on a CPU {ROWS_PER_STEP['cpu']}")
    demo.set_defaults(**dict.fromkeys(_UNSET))


def run_demo(args: argparse.Namespace) -> int:
    """Run the demo, and print the result and the next command."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # model and texts are installed
    try:
        import torch

        from ..extension.messages import others_quiet

        with others_quiet():  # imported packages warn of optional ones that are missing
            from ..demo.run import next_command, run
        from ..extension.options import ExtendOptions
    except ModuleNotFoundError as error:
        raise ImportError(f"the demo needs {error.name}: pip install 'rope-patch[demo]'.") from error
    device = choose_device(args.device, torch.cuda.is_available())
    names = ExtendOptions.__dataclass_fields__.keys() - {"device"}
    given = {name: value for name, value in vars(args).items() if name in names and value is not None}
    given |= {name: tuple(given[name]) for name in ("held_out", "lengths") if name in given}
    done = run(args.output_dir, device, given)
    shown = given | ({"device": args.device} if args.device else {})
    print(f"\n{done}\n\nNext, with long texts of your own: {next_command(args.output_dir, shown)}")
    return 0
