"""`rope-patch export`: write a checkpoint for another program."""

import argparse
from pathlib import Path
from typing import Any

from .hub_revision import add_model_revision
from .model_spec import ModelSpec

TARGETS = ("transformers", "vllm", "sglang", "llama.cpp", "mlx")  # those of rope_patch.export, whose import is slow


def add_commands(commands: Any) -> None:
    """Add `export` to the subparsers."""
    export = commands.add_parser(
        "export",
        help="write a checkpoint that another program serves correctly: merged adapters, both config formats, GGUF",
        description="Write a checkpoint for one program, check it in a process without this package and print the "
        "command that serves it. A model that the program would serve wrong is refused, with an alternative.",
    )
    export.set_defaults(run=run_export, output_dir=None)
    export.add_argument(
        "model",
        metavar="MODEL_OR_ADAPTER[@METHOD:OPTION=VALUE,...]",
        help="hub id or folder of a checkpoint, or folder of an adapter; after @ a RoPE scaling to apply first, e.g. "
        "my-model@ntk:factor=8",
    )
    add_model_revision(export)
    export.add_argument("--output", type=Path, required=True, help="folder to write, new or empty")
    export.add_argument("--target", choices=TARGETS, default="transformers", help="default: %(default)s")
    export.add_argument(
        "--converter",
        type=Path,
        help="llama.cpp's convert_hf_to_gguf.py, for --target llama.cpp; default: on PATH",
    )
    export.add_argument(
        "--max-shard-gb",
        type=float,
        default=5.0,
        help="size of a file of weights, in 10^9 bytes; default: %(default)s",
    )
    export.add_argument(
        "--report",
        type=Path,
        help="report of `rope-patch eval` for the model card: its folder or results.json; default: the folder "
        "rope-patch-report in the checkpoint, or beside it if it measured this checkpoint",
    )
    export.add_argument(
        "--tokenizer",
        help="folder or hub id of the tokenizer to copy; default: that in MODEL_OR_ADAPTER, else the base model's",
    )
    export.add_argument(
        "--check",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="load the result without this package and compare its logits; default: yes",
    )


def run_export(args: argparse.Namespace) -> int:
    """Export, and print the result and the command that serves it."""
    from rope_patch import export
    from rope_patch.base.hub_revision import require_revision
    from rope_patch.checkpoints.weights_in_parts import require_whole_weights
    from rope_patch.eval.report import require_writable
    from rope_patch.export.sources import base_of, revision_of_base

    from ..runs.checkpoint import ADAPTER_CONFIG, require_checkpoint

    spec = ModelSpec.parse(args.model) if "@" in args.model else None
    path = args.model if spec is None else spec.path
    require_revision(args.model_revision, path, "--model-revision")
    require_whole_weights(path, "MODEL_OR_ADAPTER")
    if (Path(path) / ADAPTER_CONFIG).is_file():
        require_checkpoint(base_of(Path(path)), f"MODEL_OR_ADAPTER {path}", revision_of_base(Path(path)))
    else:
        require_checkpoint(path, "MODEL_OR_ADAPTER", args.model_revision)
    if spec is not None:
        spec.check()
    # the nearest folder that exists, before weights are read
    require_writable(next(path for path in (args.output, *args.output.absolute().parents) if path.exists()))
    done = export(
        args.model if spec is None else spec.of_revision(args.model_revision).load("cpu", "auto"),
        args.output,
        target=args.target,
        converter=args.converter,
        max_shard_gb=args.max_shard_gb,
        check=args.check,
        report=args.report,
        tokenizer=args.tokenizer,
        revision=args.model_revision,
    )
    print(done)
    return 0
