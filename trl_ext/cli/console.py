"""The console script `rope-patch`."""

import argparse
import json
import os
import runpy
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..checkpoint import require_checkpoint, require_no_adapter
from ..demo.settings import CPU, GPU, DemoSettings
from .check import add_commands as add_check
from .device import choose_device
from .export import add_commands as add_export
from .extend import add_commands as add_extend
from .measure import add_commands
from .methods import add_commands as add_methods
from .parsing import CommandParser
from .rows import add_commands as add_rows
from .train import add_commands as add_train
from .user_errors import run_command


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; 0 if it is done, 130 if it was stopped by Ctrl-C, 2 after a mistake that the user can mend."""
    args = _parser().parse_args(arguments)
    try:
        return run_command(f"rope-patch {args.command}", lambda: _run(args))
    except KeyboardInterrupt:
        kept = (
            "" if args.output_dir is None else f" What is done is kept: the same command goes on in {args.output_dir}."
        )
        print(f"\nStopped.{kept}", file=sys.stderr)
        return 130


def _run(args: argparse.Namespace) -> int:
    from rope_patch.plugins import load_plugins

    load_plugins()
    status: int = args.run(args)
    return status


def _parser() -> CommandParser:
    parser = CommandParser(prog="rope-patch", description="Long-context adaptation for Hugging Face models with RoPE.")
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and end")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    demo = commands.add_parser(
        "demo",
        help="the main job, small: measure, patch, fine-tune, measure again, save, reload",
        description="Fine-tune a small model for positions beyond its window and show loss by position before and "
        "after. The embedded model and corpus need no network. A run that was stopped goes on with the same command.",
    )
    demo.set_defaults(run=_demo)
    demo.add_argument("--output-dir", type=Path, default=Path("rope-patch-demo"), help="default: %(default)s")
    demo.add_argument("--model", help="hub id or folder of a causal LM; default: SmolLM2-135M-Instruct, embedded")
    demo.add_argument("--view", help=f"view to train with; default: {GPU.view}, on a CPU {CPU.view}")
    demo.add_argument("--view-args", type=_json_object, help="its options as a JSON object")
    demo.add_argument("--rescale", help="rescaling to apply first, e.g. yarn; default: none")
    demo.add_argument("--rescale-args", type=_json_object, help="its options as a JSON object, e.g. '{\"factor\": 4}'")
    demo.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda where there is one")
    for name, what in (
        ("measure-length", "tokens in a measured row"),
        ("measure-rows", "held-out rows measured"),
        ("train-length", "tokens in a training row"),
        ("batch-size", "rows in an optimizer step"),
        ("steps", "optimizer steps"),
        ("lora-rank", "rank of the adapters"),
        ("seed", "of everything"),
    ):
        key = name.replace("-", "_")
        demo.add_argument(
            f"--{name}", type=int, help=f"{what}; default: {getattr(GPU, key)}, on a CPU {getattr(CPU, key)}"
        )
    demo.add_argument("--learning-rate", type=float, help=f"default: {GPU.learning_rate}")
    demo.add_argument(
        "--control",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="also train without the view on the same text; default: yes, on a CPU no",
    )
    add_extend(commands)
    add_train(commands)
    add_commands(commands)
    add_rows(commands)
    add_export(commands)
    add_methods(commands)
    add_check(commands)
    return parser


class _Version(argparse.Action):
    """Prints the version, without importing the package, and with it torch."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        spec = find_spec("rope_patch")
        assert spec is not None and spec.origin is not None
        version = runpy.run_path(str(Path(spec.origin).with_name("version.py")))["__version__"]
        print(f"rope-patch {version}")
        parser.exit()


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"must be a JSON object such as '{{\"factor\": 4}}', got {text!r}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object such as '{{\"factor\": 4}}', got {text!r}")
    return value


def _demo(args: argparse.Namespace) -> int:
    if args.model is None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # all that is needed is installed
    import torch

    from rope_patch.methods import resolve_rescaling, resolve_view

    try:
        from ..demo.run import run
    except ModuleNotFoundError as error:
        raise ImportError(f"the demo needs {error.name}: pip install 'rope-patch[demo]'.") from error

    settings = _settings(args, torch.cuda.is_available())
    if args.model is not None:
        require_no_adapter(args.model, "--model")
        require_checkpoint(args.model, "--model")
    resolve_view(settings.view, settings.view_args)
    if settings.rescale is not None:
        resolve_rescaling(settings.rescale, settings.rescale_args)
    run(settings, args.output_dir)
    return 0


def _settings(args: argparse.Namespace, has_gpu: bool) -> DemoSettings:
    defaults = GPU if choose_device(args.device, has_gpu) == "cuda" else CPU
    given = {k: v for k, v in vars(args).items() if v is not None and hasattr(defaults, k)}
    if given.get("view", defaults.view) != defaults.view:
        # the default options belong to the default view; another one has to reach what is measured
        from rope_patch.methods import find_view

        lengths = (given.get(name, getattr(defaults, name)) for name in ("train_length", "measure_length"))
        given.setdefault("view_args", find_view(given["view"]).reaching(*lengths))
    for name in ("measure_length", "measure_rows", "train_length", "batch_size", "steps", "lora_rank"):
        if given.get(name, 1) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {given[name]}.")
    if not given.get("learning_rate", 1.0) > 0:
        raise ValueError(f"--learning-rate must be above 0, got {given['learning_rate']}.")
    return replace(defaults, **given)
