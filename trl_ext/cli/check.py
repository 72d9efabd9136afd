"""`rope-patch check`: try out on a model what this package does."""

import argparse
import logging
import time
from typing import Any

from ..engines.device import choose_device
from ..runs.checkpoint import require_checkpoint, require_no_adapter
from .hub_revision import add_model_revision

SHORTEST_ROW = 16


def add_commands(commands: Any) -> None:
    """Add `check` to the subparsers."""
    check = commands.add_parser(
        "check",
        help="does it work on my model? Tries out what this package does",
        description="Try out on a model what this package does: views, RoPE scaling, saving, distillation, attention "
        "implementations. Each check prints a line: ok; refused, with the reason, if the model does not support it; or "
        "WRONG, with the numbers. The exit status is 1 if any check is WRONG. A small model takes about a minute. "
        "The command needs memory for one copy of the weights.",
    )
    check.set_defaults(run=run_check_command, output_dir=None)
    check.add_argument("model", metavar="MODEL", help="hub id or folder of a checkpoint")
    add_model_revision(check)
    check.add_argument(
        "--dtype",
        choices=["auto", "bfloat16", "float16", "float32"],
        default="auto",
        help="auto is the checkpoint's; float32 finds the smallest errors; default: %(default)s",
    )
    check.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda if there is a GPU")
    check.add_argument("--attn", help="attention implementation, e.g. flash_attention_2; default: the model's")
    check.add_argument(
        "--tokens", type=int, default=64, help=f"tokens in a sequence, at least {SHORTEST_ROW}; default: %(default)s"
    )


def run_check_command(args: argparse.Namespace) -> int:
    """Check a model; 1 if a check finds something wrong."""
    if args.tokens < SHORTEST_ROW:
        raise ValueError(f"--tokens must be at least {SHORTEST_ROW}, got {args.tokens}.")
    from rope_patch.base.hub_revision import require_revision

    require_no_adapter(args.model, "MODEL")
    require_revision(args.model_revision, args.model, "--model-revision")
    require_checkpoint(args.model, "MODEL", args.model_revision)
    import torch
    from transformers.utils import logging as hf_logging

    from rope_patch import describe
    from rope_patch.checkpoints.checked_loading import load_checkpoint
    from rope_patch.checks.model_checks import CHECKS, CheckedModel, run_check
    from rope_patch.families.attention_calls import attention_name

    begin = time.perf_counter()
    hf_logging.set_verbosity_error()  # what a patch logs is no outcome of a check
    hf_logging.disable_progress_bar()
    logging.getLogger("rope_patch").setLevel(logging.ERROR)
    device = choose_device(args.device, torch.cuda.is_available())
    model: Any = load_checkpoint(
        args.model, dtype=args.dtype, revision=args.model_revision, attn_implementation=args.attn
    )
    model = model.to(device).eval().requires_grad_(False)
    checked = CheckedModel(model, args.tokens)
    print(describe(model))
    if not checked.plain.isfinite().all():
        raise ValueError(f"the logits of {args.model} are not finite before anything is patched: try another --dtype.")
    shape = f"2 sequences of {checked.n_tokens} tokens"
    print(f"\n{checked.dtype}, {attention_name(model)}, {shape} on {checked.ids.device}\n")
    outcomes = []
    for name, check in CHECKS.items():
        start = time.perf_counter()
        outcome, detail = run_check(checked, check)
        outcomes.append(outcome)
        print(f"{name:20}  {outcome:7}  {time.perf_counter() - start:5.1f} s  {detail}", flush=True)
    wrong, refused = outcomes.count("WRONG"), outcomes.count("refused")
    print(f"\n{wrong} wrong, {refused} refused, {time.perf_counter() - begin:.0f} s")
    return int(wrong > 0)
