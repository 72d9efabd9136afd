"""`rope-patch extend`: extend the context window of a model."""

import argparse
import json
from dataclasses import fields
from typing import Any

from .export import TARGETS
from .hub_revision import add_model_revision
from .rows import shares


def add_commands(commands: Any) -> None:
    """Add `extend` to the subparsers."""
    extend = commands.add_parser(
        "extend",
        help="extend the context window of a model: plan, measure, train, export, measure again",
        description="Extend the context window of a model, so that it keeps its abilities within the old one. Settings "
        "follow measurements and the memory of this machine, and the plan gives the reason of each. The same command "
        "resumes a stopped run.",
    )
    extend.set_defaults(run=run_extend)
    extend.add_argument("model", metavar="MODEL", help="hub id or folder of a checkpoint")
    add_model_revision(extend)
    extend.add_argument("--to", type=int, required=True, metavar="N", help="target context window, in tokens")
    extend.add_argument(
        "--data",
        nargs="+",
        action="extend",
        required=True,
        metavar="SOURCE",
        help="long documents: .jsonl(.xz, .gz) with `text` or chats in `messages`, text files, folders of these, or "
        "data sets on the hub",
    )
    extend.add_argument(
        "--output",
        dest="output_dir",
        metavar="DIR",
        required=True,
        help="folder for all results, new or of the same run",
    )
    extend.add_argument(
        "--target",
        action="append",
        default=[],
        metavar="PROGRAM",
        help=f"program to export for: {', '.join(TARGETS)}; may be repeated. A checkpoint for Transformers is always "
        "written",
    )
    extend.add_argument(
        "--report-to",
        nargs="+",
        default=[],
        metavar="NAME",
        help="where it logs: wandb, trackio, tensorboard, ...",
    )
    extend.add_argument("--converter", type=str, help="llama.cpp's convert_hf_to_gguf.py; default: on PATH")
    extend.add_argument(
        "--dry-run",
        action="store_true",
        help="print the plan and exit; nothing is written. The exit status is 1 if training does not fit",
    )
    extend.add_argument(
        "--device-memory",
        type=float,
        metavar="GIB",
        help="with --dry-run: plan for a GPU of so many GiB that is not in this machine",
    )
    extend.add_argument(
        "--devices", type=int, metavar="N", help="GPUs that train; default: one, or all if one is too small"
    )
    extend.add_argument(
        "--accelerate-config",
        metavar="NAME",
        help="how several GPUs train: ddp, zero2, fsdp2 or fsdp2-cp; default: the one that fits and sends least",
    )
    add_options(extend)


def add_options(parser: argparse.ArgumentParser, rows_per_step: str = "8") -> None:
    """Add device, seed, and the settings that are chosen automatically; the help names a default `rows_per_step`."""
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda if there is a GPU")
    parser.add_argument("--seed", type=int, default=0, help="of all random draws; default: 0")
    chosen = parser.add_argument_group("settings", "Chosen automatically unless given.")
    chosen.add_argument("--rescale", help="RoPE scaling, e.g. ntk or yarn")
    chosen.add_argument("--rescale-args", type=_json, help="its options as a JSON object, e.g. '{\"factor\": 4}'")
    chosen.add_argument("--view", help="how training shifts position IDs, e.g. pose")
    chosen.add_argument("--view-args", type=_json, help="its options as a JSON object")
    chosen.add_argument("--objective", help="native-distill or clm")
    chosen.add_argument("--objective-args", type=_json, help="its options as a JSON object")
    chosen.add_argument("--rows", type=int, help="training rows")
    chosen.add_argument("--row-length", type=int, help="tokens of a training row")
    chosen.add_argument("--shares", type=shares, metavar="KIND=WEIGHT,...", help="kinds of rows, as in rope-patch rows")
    chosen.add_argument("--short", type=float, help="share of the rows that are replaced by eight short ones each")
    chosen.add_argument("--facts", type=int, default=8, help="facts hidden in a row of questions; default: 8")
    chosen.add_argument("--own-tokens", type=int, help="tokens that the model writes itself for rows")
    chosen.add_argument(
        "--rows-per-step", type=int, default=8, help=f"rows in an optimizer step; default: {rows_per_step}"
    )
    chosen.add_argument("--train", help="what is trained: all, qkv, lora or qlora")
    chosen.add_argument("--lora-rank", type=int, default=64, help="rank of adapters; default: 64")
    chosen.add_argument("--learning-rate", type=float, help="peak learning rate")
    chosen.add_argument(
        "--gradient-checkpointing",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="compute activations again in the backward pass: less memory, more time",
    )
    chosen.add_argument(
        "--held-out", nargs="+", action="extend", default=[], metavar="SOURCE", help="documents to measure on"
    )
    chosen.add_argument("--prompts", type=int, help="retrieval prompts of each length")
    chosen.add_argument("--lengths", type=int, nargs="+", action="extend", default=[], help="their lengths, in tokens")
    chosen.add_argument(
        "--untrained", action="store_true", help="measure the RoPE scaling without training too, which is one line"
    )


def run_extend(args: argparse.Namespace) -> int:
    """Extend, and print the result."""
    from ..extension.messages import others_quiet

    with others_quiet():  # imported packages warn of optional ones that are missing
        from ..extension.extending import extend
    from ..extension.options import ExtendOptions
    from ..extension.plan import ExtensionPlan

    names = {field.name for field in fields(ExtendOptions)} - {"model", "to", "data", "output", "targets"}
    chosen = {name: value for name, value in vars(args).items() if name in names}
    chosen |= {"held_out": tuple(args.held_out), "lengths": tuple(args.lengths), "report_to": tuple(args.report_to)}
    done = extend(
        args.model,
        to=args.to,
        data=args.data,
        output=args.output_dir,
        targets=args.target,
        dry_run=args.dry_run,
        **chosen,
    )
    print(f"\n{done}" if not args.dry_run else done)
    return int(isinstance(done, ExtensionPlan) and not done.fits)


def _json(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object such as '{{\"factor\": 4}}', got {text!r}")
    return value
