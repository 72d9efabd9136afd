"""`rope-patch rows`: make training rows."""

import argparse
from functools import cache
from pathlib import Path
from typing import Any

from ..engines.device import choose_device
from ..rows.row import ASKING, KINDS, shares_with
from ..rows.row_file import contents, require_row_file, write_rows
from .hub_revision import add_model_revision


def add_commands(commands: Any) -> None:
    """Add `rows` to the subparsers."""
    rows = commands.add_parser(
        "rows",
        help="make training rows that preserve abilities: text, chats of the model, questions about hidden facts",
        description="Make training rows of the original context window and write them as JSON lines with input_ids and "
        "completion_mask, which is 1 on labels. The model itself writes the chats.",
    )
    rows.set_defaults(run=run_rows, output_dir=None)
    rows.add_argument(
        "model", metavar="MODEL", help="hub id or folder of a checkpoint or an adapter, before its extension"
    )
    add_model_revision(rows)
    rows.add_argument("--output", type=Path, required=True, help="file to write, .jsonl or .jsonl.xz")
    rows.add_argument(
        "--text",
        nargs="+",
        action="extend",
        help="text for rows of text and questions: files, or .jsonl(.xz, .gz) with `text`",
    )
    rows.add_argument("--length", type=int, help="tokens in a row; default: the original context window")
    rows.add_argument("--rows", type=int, default=288, help="rows of that length; default: %(default)s")
    rows.add_argument(
        "--shares",
        type=shares,
        metavar="KIND=WEIGHT,...",
        help=f"weight of each kind: {', '.join(KINDS)}. default: text=8,chats=8,questions=2 and 1 for each kind behind "
        "own_texts, which take the place of chats for a model without a chat template",
    )
    rows.add_argument(
        "--short",
        type=float,
        default=0.25,
        help="share of the rows that are replaced by eight short ones each; default: %(default)s",
    )
    rows.add_argument("--facts", type=int, default=8, help="facts hidden in a row of questions; default: %(default)s")
    rows.add_argument(
        "--chat",
        type=float,
        help="share of question rows in the chat template; default: 0.5, without a template 0",
    )
    rows.add_argument(
        "--label-all", action="store_true", help="label all tokens of rows without questions; default: none"
    )
    sampling = rows.add_argument_group("texts that the model writes")
    sampling.add_argument("--max-user-tokens", type=int, default=96, help="longest user's text; default: %(default)s")
    sampling.add_argument("--max-reply-tokens", type=int, default=512, help="longest reply; default: %(default)s")
    sampling.add_argument(
        "--max-text-tokens", type=int, default=1024, help="longest of own_texts; default: %(default)s"
    )
    sampling.add_argument("--temperature", type=float, default=1.0, help="default: %(default)s")
    sampling.add_argument(
        "--keep-unfinished", action="store_true", help="cut replies that do not end; default: leave them out"
    )
    sampling.add_argument("--batch-size", type=int, help="texts written at once; default: 1024, on a CPU 8")
    rows.add_argument("--seed", type=int, default=0, help="of all random draws; default: %(default)s")
    rows.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda if there is a GPU")


def run_rows(args: argparse.Namespace) -> int:
    """`rope-patch rows`."""
    require_row_file(args.output)
    import torch

    from rope_patch.eval import read_texts

    from ..rows.mix import make_rows, rows_by_kind
    from ..rows.turns import require_template
    from .model_spec import ModelSpec

    device = choose_device(args.device, torch.cuda.is_available())
    spec = ModelSpec(Path(args.model).name, args.model, None, {}, argument="MODEL").of_revision(args.model_revision)
    spec.check()
    length = args.length or spec.trained_window()
    if length is None:
        raise ValueError(f"the config of {args.model} names no window: give --length.")
    tokenizer = spec.load_tokenizer()
    weights = args.shares or shares_with("chats" if tokenizer.chat_template else "own_texts")
    counts = rows_by_kind(args.rows, weights)
    if {"text", *ASKING} & counts.keys() and not args.text:
        raise ValueError("--text must name files, as --shares asks for text or questions.")
    if "chats" in counts:
        require_template(tokenizer, "it writes no chats. Use own_texts in place of chats in --shares")

    @cache
    def model() -> Any:  # loaded once, and not for rows of other kinds
        return spec.load(device, torch.float32 if device == "cpu" else torch.bfloat16)

    written: dict[str, list[list[int]]] = {}

    def write(kind: str) -> list[list[int]]:
        written[kind] = _written(kind, args, model(), tokenizer, counts[kind] * length)  # type: ignore[index]
        return written[kind]

    made = make_rows(
        tokenizer,
        args.rows,
        length=length,
        texts=read_texts(args.text or ()),
        chats=lambda: write("chats"),
        own_texts=lambda: write("own_texts"),
        shares=weights,
        short=args.short,
        facts=args.facts,
        chat=args.chat,
        label_all=args.label_all,
        seed=args.seed,
    )
    write_rows(args.output, made)
    for kind, several in written.items():
        print(f"The model wrote {len(several):,} {kind} of {sum(map(len, several)):,} tokens.")
    for line in contents(made):
        print(line)
    print(f"Rows: {args.output}")
    return 0


def _written(kind: str, args: argparse.Namespace, model: Any, tokenizer: Any, tokens: int) -> list[list[int]]:
    """As many chats or texts of the model as rows of `tokens` tokens have room for, so that few are repeated."""
    from ..rows.sampling import sampled_chats, sampled_texts, until

    options = {"temperature": args.temperature, "seed": args.seed, "batch_size": args.batch_size}
    if kind == "chats":
        texts = sampled_chats(
            model,
            tokenizer,
            max_user_tokens=args.max_user_tokens,
            max_reply_tokens=args.max_reply_tokens,
            keep_unfinished=args.keep_unfinished,
            **options,
        )
    else:
        texts = sampled_texts(model, tokenizer, max_tokens=args.max_text_tokens, **options)
    return until(tokens, texts, f"{kind} of the model")


def shares(text: str) -> dict[str, float]:
    """Kind -> weight, from KIND=WEIGHT,..."""
    weights: dict[str, float] = {}
    for item in text.split(","):
        kind, equals, weight = item.strip().partition("=")
        if kind in weights:
            raise argparse.ArgumentTypeError(f"{kind} is there twice: {text!r}")
        try:
            weights[kind] = float(weight)
        except ValueError:
            equals = ""  # refused below
        if not equals or kind not in KINDS:
            raise argparse.ArgumentTypeError(
                f"must be KIND=WEIGHT,... of {', '.join(KINDS)}, e.g. text=1,chats=1,questions=1, got {text!r}"
            )
    return weights
