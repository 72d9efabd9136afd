"""An extension that loses nothing: rescalings and recipes by what the model writes, inside the window and beyond it.

Run: python research/experiments/keeping.py MODEL --text books.jsonl.xz ... --held-out held-out.jsonl.xz --own chats.json
         [--arms NAME ...] [--seeds 0 1 2] [--target 65536] [--bench FOLDER] [--minutes 9] [--part K/N]
         [--checkpoints FOLDER] [--out FILE.jsonl]
     python research/experiments/keeping.py MODEL --own chats.json --make-own N
     python research/experiments/keeping.py --table FILE.jsonl ... [--arms NAME ...] [--plot FILE] [--beside NAME]

An arm (keeping_arms.py) is a rescaling and, if it trains, rows of `rope-patch rows` and fields of RopeSFTConfig. It
is trained on --rows rows of the window, in bf16 autocast over float32 weights, and measured in bf16: loss by position
on held-out books; passkey, keyed numbers and keyed words as written at each length, raw and, of instruct models, in
the chat template; replies to users' texts of the native model's own chats, and how far the predictions on those chats
are from the native model's; answers to SQuAD's questions about a paragraph, if --squad names a file of them; RULER's
tasks, with --ruler; short-text benchmarks, if --bench names a folder with them. A seed draws rows, their order and gaps.

Arms with "skills" in their name have rows that take a skill in place of most plain questions; with --rows 288 those of
"skills-but-SKILL" differ from "skills" in that skill's rows alone.

Arms with "evidence" in their name learn from answers of their own to fewer rows (keeping_evidence.py). The weights that
one starts from are those in --checkpoints; if they are not there, they are trained first.

With --rescaling FILE, of factor_search.py, there are two more arms: "searched", the model under the rescaling that was
found, and "keep-2-searched", trained under it. The file of another search needs another --out.

--own is a file of chats (of a base model texts) that the native model wrote; --make-own N writes it and ends.
One JSON line an arm and seed is added to --out, with every prompt's score, so that arms can be compared in pairs. With
--checkpoints a run that is cut off goes on: what it had measured is in OUT.parts.jsonl, and what it trained is kept.
"""

import argparse
import itertools
import json
import math
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer

from factor_results import searched_rescaling
from harness import (
    DEVICE,
    Line,
    Run,
    carry_out,
    chosen,
    load,
    logged,
    require,
    short_texts_at_once,
    show,
    study_parser,
    train,
)
from keeping_arms import Arm, arms
from keeping_evidence import train_on_evidence
from keeping_plot import plot
from keeping_questions import KEYED, NEW_TOKENS, Asked, answered, keyed, passkeys
from keeping_results import tables
from native_kl import kl_from, losses_of
from paragraph_questions import Paragraph, answers_about, read_paragraphs
from result_parts import Parts
from rope_patch import patch_model
from rope_patch.eval import context_gain, loss_by_position, read_texts
from rope_patch.eval.measures.harness import require_lm_eval
from rope_patch.eval.measures.ruler_prompts import TASKS, RulerPrompts
from rope_patch.generation.generation import greedy_tokens
from rope_patch.layout.special_tokens import SpecialTokens
from rope_patch.prompts.asking import ChatTemplate, Frame
from rope_patch.views.by_name import resolve_view
from ruler_prompts import kept_prompts, ruler_scores
from trl_ext.rows import make_rows, own_chats, own_texts

EDGES = [64, *(2**k for k in range(10, 18))]
REPLY = 128  # tokens of a reply in a chat, at most
GPU = torch.cuda.is_available()
# of all arms: those of arXiv:2309.10400's fine-tuning but for the rate, which an arm has
TRAINING: dict[str, Any] = {
    "num_train_epochs": 1,
    "adam_beta2": 0.95,
    "warmup_steps": 0.05,
    "lr_scheduler_type": "cosine_with_min_lr",
    "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
    "gradient_accumulation_steps": 8,
    "per_device_train_batch_size": 1,
    "gradient_checkpointing": False,
    "bf16": GPU,
    "logging_steps": 4,
    "logging_first_step": True,
    "dataloader_pin_memory": GPU,
}


@dataclass
class Data:
    """What all arms share."""

    tokenizer: Any
    texts: list[str]
    gains: list[float]
    held_out: torch.Tensor
    own: list[list[int]]
    held_out_own: list[list[int]]
    asked: dict[tuple[str, bool, int], list[Asked]]
    paragraphs: list[Paragraph] = field(default_factory=list)
    ruler: dict[ChatTemplate, RulerPrompts] = field(default_factory=dict)

    @property
    def kind_of_own(self) -> Literal["chats", "own_texts"]:
        """The rows that are made of what the native model wrote."""
        return "chats" if self.tokenizer.chat_template else "own_texts"


def served(folder: str | Path) -> Any:
    """A checkpoint as programs that serve it load it."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16 if GPU else torch.float32)
    return model.to(DEVICE).eval()


def held_out_rows(tokenizer: Any, texts: list[str], length: int, rows: int) -> torch.Tensor:
    """The first `length` tokens of each of the first `rows` texts that have so many."""
    begin, chosen = list(SpecialTokens.of(tokenizer).begin), []
    for text in texts:
        if len(chosen) == rows:
            break
        ids = [*begin, *tokenizer(text[: 8 * length], add_special_tokens=False, verbose=False)["input_ids"]]
        if len(ids) >= length:
            chosen.append(ids[:length])
    return torch.tensor(chosen)


def all_asked(tokenizer: Any, held_out: torch.Tensor, args: argparse.Namespace) -> dict[Any, list[Asked]]:
    """The questions by test, form and length: fewer beyond the window, where they are not compared in pairs."""
    questions: dict[tuple[str, bool, int], list[Asked]] = {}
    forms = (False, True) if tokenizer.chat_template else (False,)
    for chat in forms:
        for length in args.lengths:
            within = length < args.window
            prompts = (args.prompts if within else args.prompts // 2) // len(forms)
            passkey_prompts = prompts if length <= 2 * args.window else prompts // 2
            questions["passkey", chat, length] = passkeys(tokenizer, length, passkey_prompts, chat, args.question_seed)
            books = max(prompts // 8, 1)
            for test in KEYED:
                questions[test, chat, length] = keyed(
                    test, tokenizer, held_out.tolist(), length, books, chat, args.question_seed
                )
    return questions


def ruler_lengths(args: argparse.Namespace) -> dict[ChatTemplate, list[int]]:
    """Lengths of RULER's prompts, raw ("off") and in the chat template ("on"), where there are any."""
    of_form: dict[ChatTemplate, list[int]] = {"off": args.ruler_lengths, "on": args.ruler_chat_lengths}
    return {chat: lengths for chat, lengths in of_form.items() if lengths and args.ruler}


def ruler_of(tokenizer: Any, held_out: torch.Tensor, args: argparse.Namespace) -> dict[ChatTemplate, RulerPrompts]:
    """RULER's prompts of each form, with needles in the held-out rows."""
    files = {"ruler_qa_squad": args.squad, "ruler_qa_hotpot": args.hotpotqa}
    args.ruler_tasks = args.ruler_tasks or [task for task in TASKS if files.get(task, True)]
    books = held_out[:, len(SpecialTokens.of(tokenizer).begin) :]
    texts = tokenizer.batch_decode(books)
    return {
        chat: kept_prompts(tokenizer, texts, args, lengths, args.hotpotqa, chat)
        for chat, lengths in ruler_lengths(args).items()
    }


@torch.no_grad()
def gains_of(native: Any, tokenizer: Any, texts: list[str], window: int) -> list[float]:
    """What the native model gains in the first window of each text from more than its last eighth, nats a token."""
    begin = SpecialTokens.of(tokenizer).begin
    gains = []
    for text in texts:
        rows = held_out_rows(tokenizer, [text], window, 1)
        short = window // 8
        gains.append(
            context_gain(native, rows, begin=begin, short=short, stride=short, progress=False).total
            if len(rows)
            else -math.inf
        )
    return gains


def texts_of(arm: Arm, data: Data) -> list[str]:
    """The texts that an arm is trained on, in their order."""
    if arm.gain is None:
        return data.texts
    least = sorted(data.gains, reverse=True)[round(arm.gain * len(data.gains)) - 1]
    return [text for text, gain in zip(data.texts, data.gains, strict=True) if gain >= least]


def training_rows(arm: Arm, data: Data, args: argparse.Namespace, seed: int) -> Dataset:
    assert arm.shares is not None
    rows = make_rows(
        data.tokenizer,
        arm.times * args.rows,
        length=arm.row_length or args.window,
        texts=texts_of(arm, data),
        shares=arm.shares,
        seed=seed,
        progress=False,
        **{data.kind_of_own: data.own},
        **arm.rows,
    )
    return Dataset.from_dict({"input_ids": [r.ids for r in rows], "completion_mask": [r.labelled for r in rows]})


def trained(
    name: str, arm: Arm, data: Data, args: argparse.Namespace, seed: int, parts: Parts
) -> tuple[Any, dict[str, Any]]:
    """The model of an arm, how long training took and what was logged; of an earlier run if that has kept both."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(args.checkpoints or folder) / f"{name}-{seed}"
        if "training" not in parts.known or not checkpoint.is_dir():
            parts.begin()
            parts.get("training", lambda: train_arm(arm, data, args, seed, checkpoint))
        return served(checkpoint), parts.known["training"]


def train_arm(arm: Arm, data: Data, args: argparse.Namespace, seed: int, checkpoint: Path) -> dict[str, Any]:
    """Save what training ends with; how long it took and what was logged."""
    if arm.evidence is not None:
        return train_by_answers(arm, data, args, seed, checkpoint)
    if arm.after is not None:
        return mixed(arm, data, args, seed, checkpoint)
    begin = time.perf_counter()
    rows = training_rows(arm, data, args, seed)
    made = time.perf_counter()
    fields = {**TRAINING, "max_length": arm.row_length or args.window, **arm.rescaling(), **arm.training}
    if args.rate is not None:
        fields["learning_rate"] = args.rate
    trainer = train(load(args.model), data.tokenizer, rows, fields, seed, args.compile, **adapters_of(arm))
    model = trainer.model if arm.lora is None else trainer.model.merge_and_unload()
    model.save_pretrained(checkpoint)
    history = logged(trainer)
    return {
        "rows_seconds": made - begin,
        "train_seconds": trainer.state.log_history[-1]["train_runtime"],
        "steps": trainer.state.global_step,
        "learning_rate": fields["learning_rate"],
        "compiled": args.compile,
        "log": history[:: max(len(history) // 8, 1)] + history[-1:],
    }


def train_by_answers(arm: Arm, data: Data, args: argparse.Namespace, seed: int, checkpoint: Path) -> dict[str, Any]:
    """`train_arm` of an arm that learns from its own answers."""
    assert arm.evidence is not None and arm.rescale is not None
    if arm.after is None:
        model = patch_model(load(args.model), arm.rescale[0], **arm.rescale[1])
    else:
        model = load(checkpoint_of(arm.after, data, args, seed, checkpoint))
    figures = train_on_evidence(
        model,
        load(args.model),
        data.tokenizer,
        texts_of(arm, data),
        round(arm.evidence * args.rows),
        length=arm.row_length or args.window,
        view=resolve_view(arm.training["view"], arm.training["view_args"]),
        rate=arm.training["learning_rate"] if args.rate is None else args.rate,
        seed=seed,
    )
    model.save_pretrained(checkpoint)
    return {"started_from": arm.after or "native", **figures}


def mixed(arm: Arm, data: Data, args: argparse.Namespace, seed: int, checkpoint: Path) -> dict[str, Any]:
    """`train_arm` of an arm that takes back a share of what another's training changed, and trains nothing."""
    assert arm.after is not None
    model = load(checkpoint_of(arm.after, data, args, seed, checkpoint))
    mix_with(model, load(args.model), arm.kept)
    model.save_pretrained(checkpoint)
    return {"started_from": arm.after, "kept": arm.kept, "train_seconds": 0.0, "log": []}


def checkpoint_of(name: str, data: Data, args: argparse.Namespace, seed: int, beside: Path) -> Path:
    """What an arm's training ended with, in the folder that `beside` is in; it is trained if it is not there."""
    folder = beside.with_name(f"{name}-{seed}")
    if not folder.is_dir():
        train_arm(known_arms(args, data.kind_of_own)[name], data, args, seed, folder)
    return folder


def adapters_of(arm: Arm) -> dict[str, Any]:
    """The trainer's adapters, of an arm that trains some."""
    if arm.lora is None:
        return {}
    config = LoraConfig(r=arm.lora, lora_alpha=2 * arm.lora, target_modules="all-linear", task_type="CAUSAL_LM")
    return {"peft_config": config}


@torch.no_grad()
def mix_with(trained: Any, native: Any, kept: float) -> None:
    """Move the weights of `trained` back towards `native`'s: w_native + kept (w_trained - w_native)."""
    before = dict(native.named_parameters())
    for name, weight in trained.named_parameters():
        weight.copy_(torch.lerp(before[name].to(weight), weight, kept))


@torch.no_grad()
def own_text_figures(model: Any, native: Any, tokenizer: Any, own: list[list[int]]) -> dict[str, Any]:
    """What became of what the native model said, by chats (texts) of its own that nothing was trained on.

    kl: mean over tokens of KL(native || model), in nats.
    replies, of instruct models: of each reply that the model writes to a user's text of those chats, the mean over
    tokens of -ln p of the native model, the tokens, and whether it ended.
    """
    figures: dict[str, Any] = {"kl": kl_from(native, model, own)}
    if not tokenizer.chat_template:
        return figures
    turn = tokenizer(Frame.of(tokenizer, True).turn, add_special_tokens=False)["input_ids"]
    prompts = [p for p in (_up_to_reply(text, turn) for text in own) if p]
    replies = greedy_tokens(model, prompts, pad_token=tokenizer.eos_token_id, max_new_tokens=REPLY)
    pairs = list(zip(prompts, replies, strict=True))
    losses = losses_of(native, prompts, replies)
    figures["replies"] = [
        {"nll": nll, "tokens": len(r), "ended": len(r) < REPLY} for nll, r in zip(losses, replies, strict=True)
    ]
    figures["shown"] = [tokenizer.decode([*p, *r]) for p, r in pairs[:4]]
    return figures


def _up_to_reply(chat: list[int], turn: list[int]) -> list[int] | None:
    ends = [k + len(turn) for k in range(len(chat) - len(turn)) if chat[k : k + len(turn)] == turn]
    return chat[: ends[0]] if ends else None


def measure(model: Any, native: Any, data: Data, args: argparse.Namespace, parts: Parts) -> dict[str, Any]:
    """Everything that is measured of a model in bf16, but for what `parts` has."""

    def losses() -> list[dict[str, float]]:
        curve = loss_by_position(model, data.held_out, progress=False)
        return curve.bins([*(e for e in EDGES if e < curve.seq_len), curve.seq_len])

    begin = time.perf_counter()
    figures: dict[str, Any] = {}
    for chat, prompts in data.ruler.items():
        name = "ruler" if chat == "off" else "ruler_chat"
        figures[name] = ruler_scores(model, data.tokenizer, prompts, parts, chat)
    figures |= {
        "loss_by_position": parts.get("losses", losses),
        "own": parts.get("own", partial(own_text_figures, model, native, data.tokenizer, data.held_out_own)),
        "asked": [parts.get(f"{cell}", partial(asked, model, data, *cell)) for cell in data.asked],
    }
    if data.paragraphs:
        figures["squad"] = parts.get("squad", partial(answers_about, model, data.tokenizer, data.paragraphs))
    if args.bench:
        figures["short_text"] = parts.get("short_text", partial(short_text_figures, model, data, args))
    figures["measure_seconds"] = time.perf_counter() - begin
    return figures


def asked(model: Any, data: Data, test: str, chat: bool, length: int) -> dict[str, Any]:
    """What a model wrote to the questions of one test, form and length."""
    cell = {"test": test, "chat": chat, "length": length}
    return {**cell, **answered(model, data.tokenizer, test, data.asked[test, chat, length], length)}


def short_text_figures(model: Any, data: Data, args: argparse.Namespace) -> dict[str, Any]:
    """Accuracy over the benchmarks of --bench, sample by sample."""
    from rope_patch.eval import short_text

    since = time.perf_counter()
    # through a chat template LAMBADA has no right answer from any model
    accuracies = short_text(
        model,
        data.tokenizer,
        data=args.bench,
        limit=args.bench_limit,
        batch_size=short_texts_at_once(model),
        chat_template="off",
    )
    return {
        "accuracy": accuracies.accuracy,
        "scores": accuracies.scores,
        "seconds": time.perf_counter() - since,
    }


def summary(figures: dict[str, Any]) -> str:
    """One arm's figures in a few lines."""
    losses = "  ".join(f"{b['end'] // 1024}K {b['loss']:.3f}" for b in figures["loss_by_position"])
    lines = [f"  loss to {losses}  KL on own texts {figures['own']['kl']:.3f}"]
    if "replies" in figures["own"]:
        replies = figures["own"]["replies"]
        means = {name: fmean(r[name] for r in replies) for name in ("nll", "tokens", "ended")}
        lines.append("  replies " + "  ".join(f"{name} {value:.3f}" for name, value in means.items()))
    for test in NEW_TOKENS:
        for chat in (False, True):
            cells = [c for c in figures["asked"] if (c["test"], c["chat"]) == (test, chat)]
            if cells:
                shown = "  ".join(f"{c['length']} {fmean(c['scores']):.2f}" for c in cells)
                lines.append(f"  {test:8}{'chat' if chat else 'raw':5} {shown}")
    for name, shown in (("ruler", "RULER"), ("ruler_chat", "RULER, chat")):
        if name in figures:
            of_lengths = zip(*figures[name]["scores"].values(), strict=True)
            means = [fmean(map(fmean, of_tasks)) for of_tasks in of_lengths]
            lines.append(
                f"  {shown:12} "
                + "  ".join(f"{n} {m:.3f}" for n, m in zip(figures[name]["lengths"], means, strict=True))
            )
    if "squad" in figures:
        lines.append(f"  questions about paragraphs {fmean(figures['squad']['scores']):.3f}")
    if "short_text" in figures:
        lines.append("  " + "  ".join(f"{name} {a:.3f}" for name, a in figures["short_text"]["accuracy"].items()))
    return "\n".join(lines)


def known_arms(args: argparse.Namespace, kind_of_own: Literal["chats", "own_texts"]) -> dict[str, Arm]:
    """Every arm by name, with those of --rescaling."""
    searched = searched_rescaling(args.rescaling) if args.rescaling else None
    return arms(args.window, args.target, kind_of_own, args.row_length, searched)


def run(name: str, seed: int, native: Any, data: Data, args: argparse.Namespace) -> Iterator[Line]:
    """Train one arm, if it trains, and measure it."""
    arm = known_arms(args, data.kind_of_own)[name]
    line: dict[str, Any] = {"window": args.window, "target": args.target, "rescale": arm.rescale}
    kept = args.out.with_suffix(".parts.jsonl") if args.checkpoints else None
    parts = Parts(kept, {"arm": name, "seed": seed, "question_seed": args.question_seed})
    if arm.shares is not None:
        model, training = trained(name, arm, data, args, seed, parts)
        line |= training
        print(name, line["train_seconds"], line["log"], flush=True)
    else:
        model = served(args.model)
        if arm.rescale is not None:
            patch_model(model, arm.rescale[0], **arm.rescale[1])
    yield line | measure(model, native, data, args, parts)


def main() -> None:
    parser = study_parser(__doc__, "keeping.jsonl")
    parser.add_argument("model", nargs="?")
    parser.add_argument("--plot", type=Path, help="draw the files of --table: answers by length")
    parser.add_argument("--beside", metavar="NAME", help="with --table: differences from this arm, with intervals")
    parser.add_argument("--text", nargs="+", help="JSON lines with `text`: documents to train on")
    parser.add_argument("--held-out", nargs="+", help="JSON lines with `text`: documents to measure on")
    parser.add_argument("--own", type=Path, help="chats or texts of the native model")
    parser.add_argument("--make-own", type=int, help="write that many of them, and end")
    parser.add_argument("--held-out-own", type=int, default=100)
    parser.add_argument("--window", type=int, default=8192)
    parser.add_argument("--target", type=int, default=65536)
    parser.add_argument("--rows", type=int, default=256, help="of --row-length, or as many tokens in shorter ones")
    parser.add_argument(
        "--row-length", type=int, help="tokens of a row that is trained on; by default the window, or what an arm has"
    )
    parser.add_argument(
        "--rescaling", type=Path, metavar="FILE", help="of factor_search.py: adds arms under its result"
    )
    parser.add_argument("--rate", type=float, help="learning rate of every arm that trains; by default its own")
    parser.add_argument("--compile", action="store_true", help="compile norms and MLPs while training on given rows")
    parser.add_argument(
        "--lengths",
        type=int,
        nargs="*",
        default=[2048, 4096, 7900, 16384, 32768, 60000],
        help="of passkeys and keys; none for RULER alone",
    )
    parser.add_argument("--prompts", type=int, default=200, help="of a test and length within the window; half beyond")
    parser.add_argument(
        "--question-seed", type=int, default=0, help="recipes are chosen by other prompts than reported"
    )
    parser.add_argument("--held-out-rows", type=int, default=6, help="rows for loss by position")
    parser.add_argument("--checkpoints", type=Path, help="folder that keeps what is trained, as ARM-SEED")
    parser.add_argument("--squad", type=Path, help="SQuAD's questions about paragraphs, as JSON lines")
    parser.add_argument("--ruler", type=int, default=0, metavar="N", help="prompts of each RULER task and length")
    parser.add_argument("--ruler-tasks", nargs="+", help="default: all whose data are given by --squad and --hotpotqa")
    parser.add_argument("--ruler-lengths", type=int, nargs="*", default=[4096, 8192, 16384, 32768], help="in raw text")
    parser.add_argument("--ruler-chat-lengths", type=int, nargs="+", default=[], help="in the chat template")
    parser.add_argument("--hotpotqa", type=Path, help="HotpotQA's questions, for RULER")
    parser.add_argument(
        "--bench", type=Path, help="folder with short-text benchmarks, see rope_patch.eval.measures.short_text"
    )
    parser.add_argument("--bench-limit", type=int, default=200, help="samples of each benchmark")
    args = parser.parse_args()
    if args.table:
        show(args, partial(tables, beside=args.beside), partial(plot, model=args.model))
        return
    require(parser, args, "model", "own", *(() if args.make_own else ("text", "held_out")))
    if args.bench or args.ruler:  # what is lacking is told before hours of training
        require_lm_eval()
    known = known_arms(args, "chats")
    names = chosen(parser, args, known)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    native = served(args.model)
    if args.make_own:
        write = own_chats if tokenizer.chat_template else own_texts
        made = write(native, tokenizer, args.make_own, batch_size=256 if GPU else None, progress=False)
        args.own.write_text(json.dumps(made))
        return
    held_out = held_out_rows(tokenizer, list(read_texts(args.held_out)), args.target, args.held_out_rows)
    texts_of_model = json.loads(args.own.read_text())
    texts = list(read_texts(args.text))
    chooses = any(known[name].gain is not None for name in names)
    data = Data(
        tokenizer,
        texts,
        gains_of(native, tokenizer, texts, args.window) if chooses else [],
        held_out,
        texts_of_model[args.held_out_own :],
        texts_of_model[: args.held_out_own],
        all_asked(tokenizer, held_out, args),
        read_paragraphs(args.squad) if args.squad and args.lengths else [],
        ruler_of(tokenizer, held_out, args),
    )
    # what does not train is the same with every seed
    runs = [
        Run(
            f"{name}, seed {seed}",
            {"arm": name, "seed": seed, "question_seed": args.question_seed},
            partial(run, name, seed, native, data, args),
            {"arm": name},
        )
        for seed, name in itertools.product(args.seeds, names)
        if known[name].shares is not None or seed == args.seeds[0]
    ]
    carry_out(runs, args, lambda line: f"\n{summary(line)}\n")


if __name__ == "__main__":
    main()
