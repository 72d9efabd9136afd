"""An extension that loses nothing: rescalings and recipes by what the model writes, inside the window and beyond it.

Run: python benchmarks/token_text.py TOKENS --train books.jsonl.xz ... --val held-out.jsonl.xz --tokenizer MODEL ...
     python benchmarks/keeping.py MODEL TOKENS --chats chats.json --make-chats 2400
     python benchmarks/keeping.py MODEL TOKENS --chats chats.json [--arms NAME ...] [--seeds 0 1 2] [--out FILE.jsonl]
         [--target 65536] [--minutes 9] [--part K/N]

An arm is a rescaling and, if it trains, rows, losses, weights and a rate (`arms`). It is trained on --steps steps of
--step-tokens tokens in bf16 autocast over float32 weights and measured in bf16: loss by position on held-out books,
passkey and keyed numbers as written at each length, raw and in the chat template, and the divergence of its predictions
from the native model's on chats of that model. One JSON line an arm and seed is added to --out, with every prompt's
score, so that arms can be compared in pairs.
"""

import argparse
import copy
import gc
import json
import random
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from keeping_questions import NEW_TOKENS, Asked, keys, passkeys, right
from keeping_rows import Row, book_rows, chat_rows, gaps, question_rows
from result_lines import Deadline, add_line, read_lines, share, versions
from token_text import first_rows, read_documents
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer

from rope_kernels import linear_kl_rows
from rope_patch import patch_model, rope_view
from rope_patch.eval import loss_by_position
from rope_patch.eval.asking import Frame
from rope_patch.eval.generation import greedy_answers

EDGES = [64, 1024, 2048, 4096, 8192, 16384, 32768, 65536]
TOKENS_HELD = 2**20  # in the caches of prompts that are answered together
WARM_UP = 0.05  # of the steps
Rescale = tuple[str, dict[str, Any]] | None


@dataclass(frozen=True)
class Arm:
    """One recipe.

    Args:
        rescale: name and options; None for the native model.
        steps: None takes --steps; 0 trains nothing.
        mix: shares of books, chats and questions among the rows.
        kl: weight of the forward KL from the native model at true positions, of all tokens.
        ce: weight of the next-token loss of all tokens.
        answers: weight of the next-token loss of answers alone, besides.
        far: share of rows whose indices have gaps.
        pieces: that gaps cut a row into, at most.
        short: share of rows that are cut into eighths, read at true positions.
        scope: which weights are trained.
        rate: learning rate at its highest.
        mixed: share of the trained weights in the average with those before training.
    """

    rescale: Rescale = None
    steps: int | None = None
    mix: tuple[float, float, float] = (1.0, 0.0, 0.0)
    kl: float = 0.0
    ce: float = 0.0
    answers: float = 0.0
    far: float = 0.5
    pieces: int = 2
    short: float = 0.0
    scope: Literal["all", "attention", "qk"] = "all"
    rate: float = 1e-4
    mixed: float = 1.0


def arms() -> dict[str, Arm]:
    """Every arm by name."""
    yarn: dict[str, Rescale] = {
        "yarn8": ("yarn", {"factor": 8.0}),
        "yarn8-temperature-1": ("yarn", {"factor": 8.0, "attention_factor": 1.0}),
        "yarn8-beta-4": ("yarn", {"factor": 8.0, "beta_fast": 4.0}),
        "yarn8-beta-4-temperature-1": ("yarn", {"factor": 8.0, "beta_fast": 4.0, "attention_factor": 1.0}),
        "ntk8": ("ntk", {"factor": 8.0}),
        "ntk16": ("ntk", {"factor": 16.0}),
        "ntk32": ("ntk", {"factor": 32.0}),
        "llama3-8": ("llama3", {"factor": 8.0}),
        "pi8": ("pi", {"factor": 8.0}),
    }
    found = {"native": Arm(steps=0), **{name: Arm(rescale, steps=0) for name, rescale in yarn.items()}}
    ntk = yarn["ntk16"]
    third = (1 / 3, 1 / 3, 1 / 3)
    keep = Arm(ntk, mix=third, kl=1.0, answers=0.1, pieces=4, short=0.25)
    found |= {
        "books-ce": Arm(ntk, ce=1.0, far=1.0),
        "books-ce-5e-4": Arm(ntk, ce=1.0, far=1.0, rate=5e-4),
        "books-kl": Arm(ntk, kl=1.0),
        "mix-ce": replace(keep, kl=0.0, ce=1.0, answers=0.0),
        "mix-kl": replace(keep, answers=0.0),
        "mix-kl-answers": keep,
        "mix-kl-answers-1": replace(keep, answers=1.0),
        "mix-kl-answers-3e-4": replace(keep, rate=3e-4),
        "mix-kl-answers-3e-5": replace(keep, rate=3e-5),
        "mix-kl-answers-attention": replace(keep, scope="attention", rate=3e-4),
        "mix-kl-answers-qk": replace(keep, scope="qk", rate=3e-4),
        "mix-kl-answers-on-yarn8": replace(keep, rescale=yarn["yarn8"]),
        "mix-kl-answers-on-yarn8-temperature-1": replace(keep, rescale=yarn["yarn8-temperature-1"]),
        "mix-kl-answers-on-ntk8": replace(keep, rescale=yarn["ntk8"]),
        "mix-kl-answers-on-ntk32": replace(keep, rescale=yarn["ntk32"]),
        "mix-kl-answers-half": replace(keep, mixed=0.5),
        "ntk32-a1": replace(keep, rescale=yarn["ntk32"], answers=1.0, rate=3e-4),
        "ntk32-a1-ce": replace(keep, rescale=yarn["ntk32"], answers=1.0, rate=3e-4, ce=0.3),
        "ntk32-a1-64": replace(keep, rescale=yarn["ntk32"], answers=1.0, rate=3e-4, steps=64),
        "ntk16-a1-ce": replace(keep, answers=1.0, rate=3e-4, ce=0.3),
        "ntk16-a1": replace(keep, answers=1.0, rate=3e-4),
    }
    return found


@dataclass
class Data:
    """What all arms share."""

    tokenizer: Any
    books: list[Any]
    held_out: torch.Tensor
    chats: list[list[int]]
    held_out_chats: list[list[int]]
    asked: dict[tuple[str, bool, int], list[Asked]]


def load(args: argparse.Namespace, rescale: Rescale) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    return model if rescale is None else patch_model(model, rescale[0], **rescale[1])


def served(model: Any) -> Any:
    """Its weights in bf16; the frequencies stay in float32, as `from_pretrained` has them."""
    model = copy.deepcopy(model)
    for p in model.parameters():
        p.data = p.data.bfloat16()
    return model.eval()


def all_asked(
    tokenizer: Any, held_out: torch.Tensor, args: argparse.Namespace
) -> dict[tuple[str, bool, int], list[Asked]]:
    """The questions by test, form and length."""
    found: dict[tuple[str, bool, int], list[Asked]] = {}
    for chat in (False, True):
        for length in args.lengths:
            # the longest take longest
            count = max(args.prompts * min(16384, length) // length, args.prompts // 4)
            found["passkey", chat, length] = passkeys(tokenizer, length, count, chat, args.question_seed)
            books = max(args.prompts // 8, 1)
            found["keys", chat, length] = keys(tokenizer, held_out.tolist(), length, books, chat, args.question_seed)
    return found


def rows_of(arm: Arm, data: Data, length: int, rng: random.Random) -> Iterator[Row]:
    """Rows of the arm's mix, kinds at random in its shares."""
    kinds = [
        book_rows(data.books, length, rng),
        chat_rows(data.chats, length, rng) if data.chats else iter(()),
        question_rows(data.tokenizer, data.books, length, rng, facts=8 if length > 4096 else 3),
    ]
    while True:
        yield next(rng.choices(kinds, arm.mix)[0])


def chosen_weights(model: Any, scope: str) -> list[Any]:
    names = {"attention": ("q_proj", "k_proj", "v_proj", "o_proj"), "qk": ("q_proj", "k_proj")}.get(scope)
    for name, p in model.named_parameters():
        p.requires_grad_(names is None or any(n in name for n in names))
    return [p for p in model.parameters() if p.requires_grad]


def _ce_sum(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), labels, reduction="sum")


def ce_sum(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum of cross-entropies, with logits of 2048 rows at a time."""
    parts = zip(hidden.split(2048), labels.split(2048), strict=True)
    total = [checkpoint(_ce_sum, h, weight, t, use_reentrant=False) for h, t in parts]
    return torch.stack(total).sum() if total else hidden.sum() * 0


def train(
    model: Any, native: Any, arm: Arm, data: Data, args: argparse.Namespace, seed: int, steps: int
) -> dict[str, Any]:
    """Train in place; how long it took and its losses."""
    rng, generator = random.Random(f"rows {seed}"), torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    before = [p.detach().clone() for p in model.parameters()]
    weights = chosen_weights(model, arm.scope)
    optimizer = torch.optim.AdamW(weights, lr=arm.rate, betas=(0.9, 0.95), weight_decay=0.0)
    warm = max(round(WARM_UP * steps), 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda s: min((s + 1) / warm, 0.1 + 0.45 * (1 + torch.cos(torch.tensor(torch.pi * s / steps)).item())),
    )
    device, window = model.device, args.window
    long_rows, short_rows = rows_of(arm, data, window, rng), rows_of(arm, data, window // 8, rng)
    rows_a_step = args.step_tokens // window
    log, begin = [], time.perf_counter()
    model.train()
    for _ in range(steps):
        parts: dict[str, float] = {}
        for _ in range(rows_a_step):
            short = rng.random() < arm.short
            rows = [next(short_rows) for _ in range(8)] if short else [next(long_rows)]
            ids = torch.tensor([r.ids for r in rows], device=device)
            answer = torch.tensor([r.answer for r in rows], device=device).bool()[:, 1:]
            length = ids.shape[1]
            far = not short and rng.random() < arm.far
            index = gaps(length, args.target, rng.randint(2, arm.pieces) if far else 1, generator)[None].to(device)
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                with rope_view(model, index=index.expand(len(rows), -1)):
                    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
                head, loss = model.lm_head.weight, hidden.sum() * 0
                if arm.kl:
                    with torch.no_grad():
                        target = native.base_model(input_ids=ids, use_cache=False).last_hidden_state
                    kl = linear_kl_rows(
                        hidden.flatten(0, 1).bfloat16(),
                        target.flatten(0, 1).bfloat16(),
                        head.bfloat16(),
                        native.lm_head.weight.bfloat16(),
                    ).mean()
                    loss = loss + arm.kl * kl
                    parts["kl"] = parts.get("kl", 0.0) + kl.item() / rows_a_step
                flat, labels = hidden[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
                if arm.ce:
                    ce = ce_sum(flat, head, labels) / len(labels)
                    loss = loss + arm.ce * ce
                    parts["ce"] = parts.get("ce", 0.0) + ce.item() / rows_a_step
                if arm.answers and bool(answer.any()):
                    chosen = answer.flatten()
                    told = ce_sum(flat[chosen], head, labels[chosen]) / chosen.sum()
                    loss = loss + arm.answers * told
                    parts["answers"] = parts.get("answers", 0.0) + told.item() / rows_a_step
            (loss / rows_a_step).backward()
        parts["norm"] = float(torch.nn.utils.clip_grad_norm_(weights, 1.0))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        log.append(parts)
    model.eval()
    with torch.no_grad():
        for p, old in zip(model.parameters(), before, strict=True):
            p.lerp_(old, 1 - arm.mixed)
    return {"train_seconds": time.perf_counter() - begin, "steps": steps, "log": log[:: max(steps // 8, 1)] + log[-1:]}


@torch.no_grad()
def divergence(model: Any, native: Any, chats: list[list[int]]) -> float:
    """Mean over tokens of KL(native || model), in nats, on chats of the native model."""
    total = tokens = 0.0
    for chat in chats:
        ids = torch.tensor([chat], device=model.device)
        told = [m(input_ids=ids).logits[0].float().log_softmax(-1) for m in (native, model)]
        total += float((told[0].exp() * (told[0] - told[1])).sum())
        tokens += len(chat)
    return total / tokens


def measure(model: Any, native: Any, data: Data) -> dict[str, Any]:
    """Everything that is measured of a model in bf16."""
    begin = time.perf_counter()
    curve = loss_by_position(model, data.held_out, progress=False)
    edges = [e for e in EDGES if e < curve.seq_len] + [curve.seq_len]
    found: dict[str, Any] = {
        "loss_seconds": time.perf_counter() - begin,
        "loss_by_position": curve.bins(edges),
        "kl_on_chats": divergence(model, native, data.held_out_chats),
        "asked": [],
    }
    for (test, chat, length), asked in data.asked.items():
        since = time.perf_counter()
        prompts = [a.shared + tail for a in asked for tail in a.tails]
        at_once = max(TOKENS_HELD // length, 1)
        said = greedy_answers(model, data.tokenizer, prompts, max_new_tokens=NEW_TOKENS[test], batch_size=at_once)
        wordings = [a.wording for a in asked for _ in a.answers]
        shown = list(zip([answer for a in asked for answer in a.answers], said, strict=True))[:3]
        cell = {"test": test, "chat": chat, "length": length, "scores": right(asked, said), "wordings": wordings}
        cell["seconds"] = time.perf_counter() - since
        found["asked"].append({**cell, "shown": shown})
    found["measure_seconds"] = time.perf_counter() - begin
    return found


def summary(found: dict[str, Any]) -> str:
    """One arm's figures in a few lines."""
    losses = "  ".join(f"{b['end'] // 1024}K {b['loss']:.3f}" for b in found["loss_by_position"])
    lines = [f"  loss to {losses}  KL on chats {found['kl_on_chats']:.3f}"]
    for test in ("passkey", "keys"):
        for chat in (False, True):
            cells = [c for c in found["asked"] if (c["test"], c["chat"]) == (test, chat)]
            shown = "  ".join(f"{c['length']} {sum(c['scores']) / len(c['scores']):.2f}" for c in cells)
            lines.append(f"  {test:8}{'chat' if chat else 'raw':5} {shown}")
    return "\n".join(lines)


@torch.no_grad()
def make_chats(model: Any, tokenizer: Any, count: int, batch: int = 400) -> list[list[int]]:
    """Chats that the model writes itself, both turns, at temperature 1 (Magpie, arXiv:2406.08464)."""
    frame = Frame.of(tokenizer, True)
    found: list[list[int]] = []
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    turn = tokenizer(frame.turn, add_special_tokens=False)["input_ids"]
    turn = turn[turn.index(end) :]
    torch.manual_seed(0)
    while len(found) < count:
        begin = torch.tensor([list(frame.begin)] * batch, device=model.device)
        said = model.generate(
            begin,
            attention_mask=torch.ones_like(begin),
            max_new_tokens=96,
            do_sample=True,
            top_k=0,
            eos_token_id=end,
            pad_token_id=end,
        )
        asked = [s[: s.index(end)] for s in said[:, begin.shape[1] :].tolist() if end in s and s.index(end) > 4]
        asked = [[*frame.begin, *a, *turn] for a in asked]
        longest = max(map(len, asked))
        ids = torch.tensor([[end] * (longest - len(a)) + a for a in asked], device=model.device)
        mask = torch.tensor([[0] * (longest - len(a)) + [1] * len(a) for a in asked], device=model.device)
        said = model.generate(
            ids, attention_mask=mask, max_new_tokens=512, do_sample=True, top_k=0, eos_token_id=end, pad_token_id=end
        )
        for a, s in zip(asked, said[:, longest:].tolist(), strict=True):
            reply = s[: s.index(end) + 1] if end in s else s
            found.append(a + reply)
        print(f"{len(found)} chats", flush=True)
    return found[:count]


def run(name: str, seed: int, native: Any, data: Data, args: argparse.Namespace) -> dict[str, Any]:
    """Train one arm, if it trains, and measure it."""
    arm = arms()[name]
    model = load(args, arm.rescale)
    steps = args.steps if arm.steps is None else arm.steps
    found: dict[str, Any] = {"arm": name, "seed": seed, "question_seed": args.question_seed, "target": args.target}
    if steps:
        found |= train(model, native, arm, data, args, seed, steps)
        print(name, found["train_seconds"], found["log"], flush=True)
    return found | measure(served(model) if torch.cuda.is_available() else model, native, data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("tokens", type=Path)
    parser.add_argument("--chats", type=Path, required=True)
    parser.add_argument("--make-chats", type=int, help="write that many chats of the model, and end")
    parser.add_argument("--held-out-chats", type=int, default=100)
    parser.add_argument("--arms", nargs="+", default=list(arms()))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--window", type=int, default=8192)
    parser.add_argument("--target", type=int, default=65536)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--step-tokens", type=int, default=65536)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 7900, 16384, 32768, 60000])
    parser.add_argument("--prompts", type=int, default=96, help="of each cell; fewer passkeys beyond 16384 tokens")
    parser.add_argument(
        "--question-seed", type=int, default=0, help="recipes are chosen by other prompts than reported"
    )
    parser.add_argument("--rows", type=int, default=6, help="held-out rows for loss by position")
    parser.add_argument("--part", default="0/1")
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--out", type=Path, default=Path("keeping.jsonl"))
    args = parser.parse_args()
    deadline = Deadline(args.minutes)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    native = served(load(args, None)) if torch.cuda.is_available() else load(args, None)
    if args.make_chats:
        args.chats.write_text(json.dumps(make_chats(native, tokenizer, args.make_chats)))
        return
    held_out = torch.from_numpy(first_rows(args.tokens, "val", args.target, args.rows))
    chats = json.loads(args.chats.read_text())
    data = Data(
        tokenizer,
        read_documents(args.tokens, "train"),
        held_out,
        chats[args.held_out_chats :],
        chats[: args.held_out_chats],
        all_asked(tokenizer, held_out, args),
    )
    runs = [(seed, name) for seed in args.seeds for name in args.arms]
    runs = [(s, n) for s, n in runs if arms()[n].steps != 0 or s == args.seeds[0]]
    longest = 0.0
    for seed, name in share(runs, args.part):
        if any(
            (r["arm"], r["seed"], r["question_seed"]) == (name, seed, args.question_seed) for r in read_lines(args.out)
        ):
            continue
        if not deadline.leaves(longest):
            print(f"{name}: not begun, it would take {longest:.0f} s", flush=True)
            return
        begin = time.perf_counter()
        try:
            found = run(name, seed, native, data, args)
        except Exception:
            traceback.print_exc()
            continue
        gc.collect()
        longest = max(longest, time.perf_counter() - begin)
        add_line(args.out, {**found, "seconds": time.perf_counter() - begin, **versions()})
        print(f"{name}, seed {seed}, {time.perf_counter() - begin:.0f} s\n{summary(found)}", flush=True)


if __name__ == "__main__":
    main()
