"""PosAug from scratch at 10.6M parameters: what each law, range and layer choice does to the cliff beyond the window.

Run: python experiments/token_text.py TOKENS --train books.jsonl.xz ... --val held-out.jsonl.xz --vocabulary 16384
     python experiments/posaug_from_scratch.py TOKENS [--tokens 2e8] [--arms NAME ...] [--seeds 42 137 2024]
         [--out FILE.jsonl] [--minutes 8.5 --state FOLDER] [--part K/N]
     python experiments/posaug_from_scratch.py --table FILE.jsonl ...

The paper's recipe (its 10.6M row): 384 wide, 6 layers of 6 heads of 64, SwiGLU of 1024, RMSNorm, tied embeddings,
RoPE base 1e4, window 2048, 128 rows a step, AdamW (0.9, 0.95), weight decay 0.1 on matrices, gradients clipped at 1,
cosine 6e-4 to 6e-5, warmup of 500 / 1907 of the steps, bf16 autocast. Ours: a byte-level BPE of 16384 entries from the
texts, in place of the paper's 50257, so that the head costs less than the layers do (embeddings are not among the
10.6M); losses therefore compare between arms, not with the paper's. Arms of a seed have the same weights at the start
and read the same rows in the same order; each epoch cuts and orders the text anew. All go through `patch_model`, the
baseline with view="standard". Layers are compiled and views drawn outside of them: every arm runs the same kernels.

Measured at true positions on 20 spans of 16384 tokens, one a book: cliff, loss within the window, exact context gain.
One JSON line an arm and seed is added to --out, and what is in it is not done again. A run that --minutes cuts off is
kept in --state and goes on from there, with the same draws and rows. --part shares the runs among processes, on one GPU
or several (CUDA_VISIBLE_DEVICES). --table prints means over seeds, and which of the paper's orderings hold.
"""

import argparse
import itertools
import json
import math
import statistics
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness import DEVICE, Line, Run, autocast, carry_out, chosen, require, show, study_parser
from result_lines import Deadline, held, orderings, runs_by_arm, spread
from token_text import first_rows, read_facts, read_stream
from transformers import LlamaConfig, LlamaForCausalLM

from rope_patch import patch_model
from rope_patch.eval import context_gain, loss_by_position
from rope_patch.heads import head_losses
from rope_patch.patch import view_source

GIB = 1 << 30
WARM_UP = 10  # steps that no rate is taken from: compilation
SHAPE = {
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "head_dim": 64,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
PEAK_LR, LAST_LR, WARMUP_SHARE = 6e-4, 6e-5, 500 / 1907


def arms(window: int) -> dict[str, tuple[str, dict[str, Any]]]:
    """Name -> (view, options)."""
    posaug: dict[str, Any] = {"view": "posaug"}
    return {
        "baseline": ("standard", {}),
        "uniform": ("posaug", {}),
        "log-uniform": ("posaug", {"law": "log-uniform"}),
        "downscale-only": ("posaug", {"high": 1.0}),
        "upper-only": ("posaug", {"low": 1.0}),
        "step": ("posaug", {"curriculum": "step"}),
        # ours: an alpha for each row, and skips that reach as far
        "uniform, rows": ("posaug", {"granularity": "sample"}),
        "step, rows": ("posaug", {"granularity": "sample", "curriculum": "step"}),
        "skip": ("skip", {"max_skip": 7 * window}),
        "skip, log": ("skip", {"max_skip": 7 * window, "law": "log-uniform"}),
        "step 1/16..16": ("posaug", {"low": 1 / 16, "high": 16.0, "curriculum": "step"}),
        "bottom": ("per-layer", {"view": posaug, "layers": "bottom"}),
        "top": ("per-layer", {"view": posaug, "layers": "top"}),
        "independent": ("per-layer", {"view": posaug, "layers": "independent"}),
        "rpe": ("rpe", {"max_index": 8 * window}),
        "fixed-4": ("posaug", {"low": 4.0, "high": 4.0}),
        "discrete": ("posaug", {"law": "discrete"}),
        "random-base": ("random-base", {}),
    }


# (metric, the arm that is lower, the arm that is higher, the paper's figures), without what differs by less than 5 %.
# Cliffs are those of its ablations at 10.6M (measured at 8K), penalties and gains those at 42.5M (at 16K).
ORDERINGS = [
    ("cliff", "uniform", "baseline", "1.07 < 2.28"),
    ("cliff", "step", "uniform", "0.72 < 1.07"),
    ("cliff", "step 1/16..16", "step", "0.24 < 0.72"),
    ("cliff", "log-uniform", "uniform", "0.96 < 1.07; 0.18 > 0.06 at 42.5M"),
    ("cliff", "uniform", "upper-only", "1.07 < 1.15"),
    ("cliff", "upper-only", "downscale-only", "1.15 < 2.17"),
    ("cliff", "uniform", "downscale-only", "1.07 < 2.17"),
    ("cliff", "top", "bottom", "1.50 < 2.36"),
    ("cliff", "uniform", "top", "1.07 < 1.50"),
    ("cliff", "independent", "uniform", "0.73 < 1.07"),
    ("cliff", "fixed-4", "uniform", "0.58 < 1.07"),
    ("cliff", "random-base", "baseline", "1.09 < 2.28"),
    ("penalty", "uniform", "rpe", "1.4 % < 14.3 %"),
    ("gain", "baseline", "uniform", "-0.71 < 2.51, by the paper's own measure"),
]


class Rows:
    """Rows of window + 1 tokens of a stream, each token once an epoch, in an order of its own.

    Args:
        stream: ids, on the device that rows are wanted on, [tokens] int16 with the bits of uint16.
        window: tokens of a row, less the last label.
        seed: of orders and of where the first row begins.
    """

    def __init__(self, stream: torch.Tensor, window: int, seed: int) -> None:
        self.stream, self.window, self.seed = stream, window, seed
        self.a_epoch = (len(stream) - 1) // window - 1  # one less than fit, as the first begins anywhere in a window
        if self.a_epoch < 1:
            raise ValueError(f"{len(stream)} tokens hold no row of {window} in every cut: give more text.")
        self.known: tuple[int, torch.Tensor] | None = None

    def of(self, first: int, count: int) -> torch.Tensor:
        """Rows first .. first + count - 1 of an endless sequence of epochs, [count, window + 1] int64."""
        starts = torch.tensor(
            [int(self._starts(i // self.a_epoch)[i % self.a_epoch]) for i in range(first, first + count)]
        )
        tokens = torch.arange(self.window + 1, device=self.stream.device)
        return self.stream[starts.to(self.stream.device)[:, None] + tokens].long() & 0xFFFF

    def _starts(self, epoch: int) -> torch.Tensor:
        if self.known is None or self.known[0] != epoch:
            rng = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            offset = torch.randint(self.window, (), generator=rng)
            self.known = epoch, offset + self.window * torch.randperm(self.a_epoch, generator=rng)
        return self.known[1]


def learning_rate(step: int, steps: int) -> float:
    """Linear warmup, then a cosine down to the last rate."""
    warmup = max(round(WARMUP_SHARE * steps), 1)
    if step < warmup:
        return PEAK_LR * (step + 1) / warmup
    return LAST_LR + (PEAK_LR - LAST_LR) * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))) / 2


class Training:
    """One arm and seed: model, optimizer and how far they are."""

    def __init__(self, name: str, seed: int, args: argparse.Namespace, stream: torch.Tensor, vocabulary: int) -> None:
        self.name, self.seed, self.args = name, seed, args
        self.device = stream.device
        torch.manual_seed(seed)
        config = LlamaConfig(
            **{**SHAPE, "vocab_size": vocabulary, "max_position_embeddings": args.window, **args.override}
        )
        # float32 weights, multiplied in bf16
        self.model: Any = LlamaForCausalLM._from_config(config, attn_implementation="sdpa", dtype=torch.float32)
        self.model.to(self.device)
        view, options = arms(args.window)[name]
        patch_model(self.model, view, seed=seed, **options)
        matrices = [p for p in self.model.parameters() if p.ndim > 1]
        vectors = [p for p in self.model.parameters() if p.ndim == 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
            betas=(0.9, 0.95),
            fused=self.device.type == "cuda",
        )
        self.rows = Rows(stream, args.window, seed)
        self.steps = max(round(args.tokens / (args.batch * args.window)), 1)
        self.step, self.seconds, self.timed_steps, self.peak = 0, 0.0, 0, 0
        self.log: list[dict[str, float]] = []
        self.file = None if args.state is None else args.state / f"{name.replace('/', '-')}-{seed}.pt"
        if self.file is not None and self.file.is_file():
            self._load()

    def train(self, deadline: Deadline) -> bool:
        """Go on to the last step; False if time was up before, and what there is was kept."""
        model, args, source = self.model.train(), self.args, view_source(self.model)
        assert source is not None
        if not args.eager:
            for layer in model.model.layers:
                # not the hooks around it, in which views are; all layers share one graph
                layer.forward = torch.compile(layer.forward, dynamic=False, fullgraph=True)
        first, weight = self.step, 1 / (args.batch * args.window)
        weights = torch.full((args.micro_batch * args.window,), weight, device=self.device)
        sums: list[torch.Tensor] = []
        while self.step < self.steps:
            if not deadline.leaves(0):
                self._save()
                return False
            begin = time.perf_counter()
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate(self.step, self.steps)
            rows = self.rows.of(self.step * args.batch, args.batch)
            total = torch.zeros((), device=self.device)
            for number, micro in enumerate(rows.split(args.micro_batch)):
                source.clock.set(self.step, number * args.micro_batch, self.step / self.steps)
                with autocast(self.model):
                    hidden = model.model(input_ids=micro[:, :-1], use_cache=False).last_hidden_state
                    labels = micro[:, 1:].flatten()
                    loss, _ = head_losses(model, hidden.flatten(0, 1), None, labels, weights[: len(labels)], None)
                loss.backward()
                total += loss.detach()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.step += 1
            sums.append(total)
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            if self.step - first > WARM_UP:
                self.seconds += time.perf_counter() - begin
                self.timed_steps += 1
            if self.step % args.log_steps == 0 or self.step == self.steps:
                mean = torch.stack(sums).mean().item()
                sums.clear()
                if not math.isfinite(mean):
                    raise FloatingPointError(f"arm {self.name!r}, seed {self.seed}: loss {mean} by step {self.step}.")
                self.log.append({"step": self.step, "loss": round(mean, 4)})
        return True

    def finish(self) -> dict[str, Any]:
        """Measure, and let go of what was kept."""
        for layer in self.model.model.layers:
            layer.__dict__.pop("forward", None)  # other shapes would compile anew
        args, val = self.args, self.args.val_rows
        begin = time.perf_counter()
        with autocast(self.model):
            curve = loss_by_position(self.model, val, progress=False)
            gain = context_gain(self.model, val, short=min(512, args.window // 4), batch_size=32, progress=False)
        ends = [args.window * k // 4 + 1 for k in (1, 2, 4, 6, 8, 12, 16, 24)]
        edges = [64, *(e for e in ends if 64 < e < curve.seq_len), curve.seq_len]
        tokens = args.batch * args.window
        figures = {
            "view": arms(args.window)[self.name],
            "tokens": self.steps * tokens,
            "epochs": self.steps * args.batch / self.rows.a_epoch,
            "parameters": sum(p.numel() for p in self.model.model.layers.parameters()),
            "vocabulary": self.model.config.vocab_size,
            "window": args.window,
            "spans": list(val.shape),
            "in_window": curve.in_window(),
            "cliff": curve.cliff(),
            "gain": gain.total,
            "loss_by_position": curve.bins(edges),
            "gain_by_position": gain.table(),
            "tokens_per_second": self.timed_steps * tokens / self.seconds if self.timed_steps else None,
            "train_seconds": self.seconds,
            "measure_seconds": time.perf_counter() - begin,
            "peak_gib": self._peak() / GIB,
            "compiled": not args.eager,
            "log": self.log,
        }
        if self.file is not None:
            self.file.unlink(missing_ok=True)
        return figures

    def _peak(self) -> int:
        return max(self.peak, torch.cuda.max_memory_allocated() if self.device.type == "cuda" else 0)

    def _plan(self) -> dict[str, Any]:
        """What a kept run must agree on to be gone on with."""
        args = self.args
        return {"steps": self.steps, "batch": args.batch, "window": args.window, "stream": len(self.rows.stream)}

    def _save(self) -> None:
        if self.file is None:
            return
        self.file.parent.mkdir(parents=True, exist_ok=True)
        kept = {"plan": self._plan(), "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        counted = {"step": self.step, "seconds": self.seconds, "timed_steps": self.timed_steps, "log": self.log}
        new = self.file.with_suffix(".new")
        torch.save({**kept, **counted, "peak": self._peak()}, new)
        new.replace(self.file)

    def _load(self) -> None:
        assert self.file is not None
        kept = torch.load(self.file, map_location=self.device, weights_only=True)
        if kept["plan"] != self._plan():
            raise ValueError(f"{self.file} holds a run with {kept['plan']}, not {self._plan()}: remove it.")
        self.model.load_state_dict(kept["model"])
        self.optimizer.load_state_dict(kept["optimizer"])
        for name in ("step", "seconds", "timed_steps", "log", "peak"):
            setattr(self, name, kept[name])


def penalties(runs: list[dict[str, Any]]) -> dict[tuple[str, int], float]:
    """(arm, seed) -> rise of the loss within the window over the baseline of the same seed, in percent."""
    baseline = {r["seed"]: r["in_window"] for r in runs if r["arm"] == "baseline"}
    return {
        (r["arm"], r["seed"]): 100 * (r["in_window"] / baseline[r["seed"]] - 1) for r in runs if r["seed"] in baseline
    }


def summary(runs: list[dict[str, Any]]) -> str:
    """Markdown: means over seeds with half of their span, and the paper's orderings seed by seed."""
    penalty = penalties(runs)
    by_arm = runs_by_arm(runs)
    window, length = runs[0]["window"], runs[0]["spans"][1]
    lines = [
        f"{runs[0]['parameters'] / 1e6:.1f}M parameters without embeddings, {runs[0]['tokens'] / 1e6:.0f}M tokens "
        f"({runs[0]['epochs']:.1f} epochs), window {window}, {runs[0]['spans'][0]} spans of {length}, {runs[0]['gpu']}",
        "",
        f"| arm | seeds | loss 64..{window} | penalty % | cliff | G({length}), exact | tokens/s | GiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for arm, same in by_arm.items():
        cost = [penalty[arm, r["seed"]] for r in same if (arm, r["seed"]) in penalty]
        cells = [spread([r["in_window"] for r in same], 3), spread(cost, 2) if cost else "-"]
        cells += [spread([r["cliff"] for r in same], 3), spread([r["gain"] for r in same], 3)]
        rates = [r["tokens_per_second"] for r in same if r["tokens_per_second"]]
        cells += [f"{statistics.mean(rates):,.0f}" if rates else "-", f"{max(r['peak_gib'] for r in same):.1f}"]
        lines.append(f"| {arm} | {len(same)} | " + " | ".join(cells) + " |")

    def value(run: dict[str, Any], metric: str) -> float | None:
        return penalty.get((run["arm"], run["seed"])) if metric == "penalty" else run[metric]

    lines += ["", *orderings(ORDERINGS, runs, value)]
    cliffs = {(r["arm"], r["seed"]): r["cliff"] for r in runs}
    both = [s for s in sorted({r["seed"] for r in runs}) if {("baseline", s), ("uniform", s)} <= set(cliffs)]
    tenth = held([cliffs["uniform", s] <= cliffs["baseline", s] / 10 for s in both])
    lines.append(f"| cliff of uniform at most a tenth of the baseline's | 0.060 and 1.915 | {tenth} |")
    cheap = held([penalty["uniform", s] <= 2 for s in both])
    lines.append(f"| penalty of uniform at most 2 % | 1.8 % | {cheap} |")
    return "\n".join(lines)


def main() -> None:
    parser = study_parser(__doc__, "posaug_from_scratch.jsonl", seeds=(42, 137, 2024))
    parser.add_argument("folder", nargs="?", type=Path, help="of token files")
    parser.add_argument("--tokens", type=float, default=2e8, help="that each arm is trained on")
    parser.add_argument("--state", type=Path, help="folder that a run is kept in when time is up")
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=128, help="rows of a step")
    parser.add_argument("--micro-batch", type=int, default=64, help="rows of a forward")
    parser.add_argument("--length", type=int, default=16384, help="tokens of a span that is measured")
    parser.add_argument("--spans", type=int, default=20)
    parser.add_argument("--eager", action="store_true", help="do not compile the layers")
    parser.add_argument("--override", type=json.loads, default={}, help="fields of LlamaConfig, as JSON")
    parser.add_argument("--log-steps", type=int, default=50)
    args = parser.parse_args()
    if args.table:
        show(args, summary, None)
        return
    require(parser, args, "folder")
    if args.batch % args.micro_batch:
        parser.error(f"--micro-batch must divide --batch={args.batch}, got {args.micro_batch}")
    names = chosen(parser, args, arms(args.window))
    torch.set_float32_matmul_precision("high")
    stream = torch.from_numpy(read_stream(args.folder, "train").view("<i2").copy()).to(DEVICE)
    args.val_rows = torch.from_numpy(first_rows(args.folder, "val", args.length, args.spans))
    vocabulary = read_facts(args.folder)["vocabulary"]

    def results(name: str, seed: int) -> Iterator[Line]:
        if DEVICE == "cuda":
            torch.cuda.reset_peak_memory_stats()
        training = Training(name, seed, args, stream, vocabulary)
        if training.train(args.deadline):
            yield training.finish()
        else:
            print(f"{name:16} seed {seed:5}  at step {training.step} of {training.steps} when time was up", flush=True)

    # seeds outermost: what a slice leaves undone is a whole comparison less, not an arm
    runs = [
        Run(f"{name:16} seed {seed:5}", {"arm": name, "seed": seed}, partial(results, name, seed))
        for seed, name in itertools.product(args.seeds, names)
    ]
    carry_out(runs, args, shown)


def shown(line: Line) -> str:
    """A line of the file in one of the terminal."""
    rate = line["tokens_per_second"] or 0
    losses = f"in window {line['in_window']:.3f}  cliff {line['cliff']:.3f}  G {line['gain']:.3f}"
    return f"{losses}  {rate:,.0f} tokens/s  {line['peak_gib']:.1f} GiB"


if __name__ == "__main__":
    main()
