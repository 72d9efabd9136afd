"""Time in which a model writes its own chats: `own_chats` beside the same by Transformers' `generate`, in one run.

Run:   python benchmarks/rows_speed.py [--model CHECKPOINT] [--chats 1000] [--old-chats 200] [--out FILE.jsonl]
       python benchmarks/rows_speed.py --quick        a tiny model, which a CPU can do in a minute
Shape: a checkpoint in bf16 (on a CPU float32); without one, random weights of SmolLM2-135M's shape that end a text at
       each token with a probability of about 1 in 100.

Each JSON line is there as soon as it is measured:
  new  --chats chats in batches of `own_chats`' own size (or --batch-size): seconds, chats a second, peak memory, and
       tokens a second, which counts what was written up to the end of each text, whether the chat was kept or not.
  old  --old-chats chats by the model's own `generate` in batches of --old-batch-size. `ratio` is the tokens a second of
       `new` over those of `old`, `chats_ratio` the same of chats.
"""

import argparse
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from eval_speed import build, language, measured, setting, tell_line
from transformers import AutoModelForCausalLM, AutoTokenizer

from rope_patch.generation.sampling import sampled_tokens
from trl_ext.rows import own_chats, sampling

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MEAN_TOKENS = 100  # of a text of random weights


def random_model(shape: str) -> tuple[Any, Any]:
    """Random weights whose texts end, and a tokenizer with a chat template."""
    tokenizer, _ = language()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = TEMPLATE
    model = build(shape, None, 0)
    more = torch.zeros(model.config.vocab_size, device=model.device, dtype=model.dtype)  # added to logits
    # logits of random weights are about 0, so this token is as likely as a hundredth of all others together
    more[tokenizer.convert_tokens_to_ids("<|im_end|>")] = math.log(model.config.vocab_size / MEAN_TOKENS)
    model.lm_head.register_forward_hook(lambda _, __, logits: logits + more)
    return model, tokenizer


def checkpoint(path: str) -> tuple[Any, Any]:
    on_gpu = torch.cuda.is_available()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16 if on_gpu else torch.float32)
    return model.to("cuda" if on_gpu else "cpu").eval(), AutoTokenizer.from_pretrained(path)


@contextmanager
def counted_tokens() -> Iterator[dict[str, int]]:
    """How many tokens are sampled inside."""
    counts = {"tokens": 0}

    def counting(*args: Any, **options: Any) -> list[list[int]]:
        texts = sampled_tokens(*args, **options)
        counts["tokens"] += sum(map(len, texts))
        return texts

    sampling.sampled_tokens = counting
    try:
        yield counts
    finally:
        sampling.sampled_tokens = sampled_tokens


@contextmanager
def own_generate(model: Any) -> Iterator[None]:
    """The model's own `generate` is asked: that of an instance is taken to do what no class knows of."""
    model.generate = model.generate
    try:
        yield
    finally:
        del model.generate


def facts_of(model: Any, tokenizer: Any, n: int, batch_size: int | None, limits: dict[str, int]) -> dict[str, Any]:
    with counted_tokens() as counts:
        chats, facts = measured(
            lambda: own_chats(model, tokenizer, n, batch_size=batch_size, progress=False, **limits)  # type: ignore[arg-type,return-value]
        )
    return {
        "chats": len(chats),
        "tokens": counts["tokens"],
        **facts,
        "chats_per_second": len(chats) / facts["seconds"],
        "tokens_per_second": counts["tokens"] / facts["seconds"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a checkpoint with a chat template; default: random weights")
    parser.add_argument("--chats", type=int, default=1000)
    parser.add_argument("--old-chats", type=int, default=200, help="0 leaves out the old way")
    parser.add_argument("--batch-size", type=int, help="of the new way; default: that of own_chats")
    parser.add_argument("--old-batch-size", type=int, default=256)
    parser.add_argument("--max-user-tokens", type=int, help="default: 96, of --quick 40")
    parser.add_argument("--max-reply-tokens", type=int, help="default: 512, of --quick 120")
    parser.add_argument("--quick", action="store_true", help="a tiny model of random weights, 8 chats in batches of 16")
    parser.add_argument("--out", type=Path, help="file that gets the JSON lines as well")
    args = parser.parse_args()
    if args.quick and args.model:
        parser.error("--quick takes a tiny model of random weights: leave out --model or --quick")
    if args.quick:
        args.chats = args.old_chats = 8
        args.batch_size = args.old_batch_size = 16

    tell = partial(tell_line, out=args.out)
    tell(setting())
    name = args.model or ("tiny" if args.quick else "smollm2-135m")
    model, tokenizer = checkpoint(args.model) if args.model else random_model(name)
    if args.max_user_tokens is None:
        args.max_user_tokens = 40 if args.quick else 96
    if args.max_reply_tokens is None:
        args.max_reply_tokens = 120 if args.quick else 512
    limits = {"max_user_tokens": args.max_user_tokens, "max_reply_tokens": args.max_reply_tokens}
    about = {"model": Path(name).name, **limits}
    # the first call of all kernels, and the check of the model, are not counted
    own_chats(model, tokenizer, 1, batch_size=args.batch_size, progress=False, **limits)
    new = facts_of(model, tokenizer, args.chats, args.batch_size, limits)
    tell({"line": "new", **about, "batch_size": args.batch_size, **new})
    if args.old_chats:
        with own_generate(model):
            old = facts_of(model, tokenizer, args.old_chats, args.old_batch_size, limits)
        ratios = {
            "ratio": new["tokens_per_second"] / old["tokens_per_second"],
            "chats_ratio": new["chats_per_second"] / old["chats_per_second"],
        }
        tell({"line": "old", **about, "batch_size": args.old_batch_size, **old, **ratios})


if __name__ == "__main__":
    main()
