"""`rope-patch export`: what it takes from the command line, and what it prints."""

import argparse
from pathlib import Path
from typing import Any

TARGETS = ("transformers", "vllm", "sglang", "llama.cpp", "mlx")  # those of rope_patch.export, whose import is slow


def add_commands(commands: Any) -> None:
    """Add `export` to the subparsers."""
    export = commands.add_parser(
        "export",
        help="write a checkpoint that another program serves right: adapters merged, both forms of the config, GGUF",
        description="Write a checkpoint for one program, check it in a process without this package and print the "
        "command that serves it. What the program would serve wrong is refused, with what to take instead.",
    )
    export.set_defaults(run=run_export, output_dir=None)
    export.add_argument(
        "model", metavar="MODEL_OR_ADAPTER", help="hub id or folder of a checkpoint, folder of an adapter"
    )
    export.add_argument("--output", type=Path, required=True, help="folder to write, new or empty")
    export.add_argument("--target", choices=TARGETS, default="transformers", help="default: %(default)s")
    export.add_argument(
        "--converter", type=Path, help="llama.cpp's convert_hf_to_gguf.py, for --target llama.cpp; default: on PATH"
    )
    export.add_argument(
        "--max-shard-gb",
        type=float,
        default=5.0,
        help="size of one file of weights, in 10^9 bytes; default: %(default)s",
    )
    export.add_argument(
        "--report",
        type=Path,
        help="report of `rope-patch eval`, folder or results.json, for the model card; default: the folder "
        "rope-patch-report in the checkpoint, or beside it if it measured this one",
    )
    export.add_argument(
        "--check",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="load the result without this package and compare its logits; default: yes",
    )


def run_export(args: argparse.Namespace) -> int:
    """Export, and print what was written and the command that serves it."""
    from rope_patch import export
    from rope_patch.eval.report import require_writable
    from rope_patch.weights_in_parts import require_whole_weights

    from ..checkpoint import base_of_adapter, require_checkpoint

    require_whole_weights(args.model, "MODEL_OR_ADAPTER")
    base = base_of_adapter(args.model)
    require_checkpoint(base or args.model, f"MODEL_OR_ADAPTER {args.model}" if base else "MODEL_OR_ADAPTER")
    require_writable(args.output.parent)
    done = export(
        args.model,
        args.output,
        target=args.target,
        converter=args.converter,
        max_shard_gb=args.max_shard_gb,
        check=args.check,
        report=args.report,
    )
    print(done)
    return 0
