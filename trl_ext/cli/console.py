"""The console script `rope-patch`."""

import argparse
import logging
import runpy
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from ..engines.device import require_one_process
from ..engines.rank_failures import is_started_rank
from ..recipes.arguments import normalized
from ..recipes.stopped import SAME_COMMAND_RESUMES
from .check import add_commands as add_check
from .demo import add_commands as add_demo
from .export import add_commands as add_export
from .extend import add_commands as add_extend
from .measure import add_commands
from .methods import add_commands as add_methods
from .new import add_commands as add_new
from .parsing import CommandParser
from .reproduce import add_commands as add_reproduce
from .rows import add_commands as add_rows
from .status import add_commands as add_status
from .train import add_commands as add_train
from .user_errors import run_command


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 130 after Ctrl-C, 2 after a mistake of the user."""
    args = _parser().parse_args(normalized(sys.argv[1:] if arguments is None else arguments))
    try:
        return run_command(f"rope-patch {args.command}", lambda: _run(args))
    except KeyboardInterrupt as stopped:
        kept = f" {stopped}" if str(stopped) else ""
        if args.output_dir is not None:
            kept = f" {SAME_COMMAND_RESUMES} {args.output_dir}."
        if not is_started_rank():
            print(f"\nStopped.{kept}", file=sys.stderr)
        return 130


def _run(args: argparse.Namespace) -> int:
    # PEFT imports bitsandbytes if it is installed, which then warns of a missing kernel that nothing here uses
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    if args.command != "train":
        require_one_process(f"rope-patch {args.command}")
    status: int = args.run(args)
    return status


def _parser() -> CommandParser:
    parser = CommandParser(prog="rope-patch", description="Long-context adaptation for Hugging Face models with RoPE.")
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add_demo(commands)
    add_extend(commands)
    add_train(commands)
    add_status(commands)
    add_commands(commands)
    add_rows(commands)
    add_export(commands)
    add_methods(commands)
    add_new(commands)
    add_check(commands)
    add_reproduce(commands)
    return parser


class _Version(argparse.Action):
    """Prints the version without importing the package, which would import torch."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        spec = find_spec("rope_patch")
        assert spec is not None and spec.origin is not None
        version = runpy.run_path(str(Path(spec.origin).with_name("version.py")))["__version__"]
        print(f"rope-patch {version}")
        parser.exit()
