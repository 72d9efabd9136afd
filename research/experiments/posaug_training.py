"""Training of research/experiments/posaug_from_scratch.py: rows of text with exams among them, and runs that go on."""

import argparse
import math
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from exams import Kind, exam_over
from harness import autocast
from posaug_arms import Arm
from result_lines import Deadline
from rope_patch import patch_model
from rope_patch.checkpoints.full_disk import whole_file
from rope_patch.losses.heads import head_losses
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


class Rows:
    """Rows of window + 1 tokens of a stream, each token once an epoch, in an order of its own.

    Args:
        stream: ids, [tokens] int16 with the bits of uint16.
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
        return self.stream[starts[:, None] + torch.arange(self.window + 1)].long() & 0xFFFF

    def _starts(self, epoch: int) -> torch.Tensor:
        if self.known is None or self.known[0] != epoch:
            rng = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            offset = torch.randint(self.window, (), generator=rng)
            self.known = epoch, offset + self.window * torch.randperm(self.a_epoch, generator=rng)
        return self.known[1]


class Steps(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Rows of each step and the weights of their labels in the loss, some of the rows made into exams.

    An exam hides its sentences in the text of its row and asks for all of them. Its answers alone count, together as
    much as the labels of a row of text. What a step holds depends on the seed and on its place alone.

    Args:
        rows: of text.
        first: row that the first step begins with.
        batch: rows of a step.
        mix: share of the rows of each step that are exams.
        kinds: of exams, drawn for each.
        keys: of an exam.
        tokenizer: for exams; None where there are none.
    """

    def __init__(
        self, rows: Rows, first: int, batch: int, mix: float, kinds: Sequence[Kind], keys: int, tokenizer: Any
    ) -> None:
        self.rows, self.first, self.batch = rows, first, batch
        self.kinds, self.keys, self.tokenizer = kinds, keys, tokenizer
        n_exams = round(mix * batch)
        self.exams = [k for k in range(batch) if (k + 1) * n_exams // batch > k * n_exams // batch]

    def __getitem__(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids [batch, window + 1] int64 and weights [batch, window] float32, which sum to 1."""
        begin = self.first + step * self.batch
        ids = self.rows.of(begin, self.batch)
        weights = torch.full((self.batch, self.rows.window), 1 / (self.batch * self.rows.window))
        for k in self.exams:
            rng = random.Random(f"{self.rows.seed} {begin + k}")
            kind = rng.choice(self.kinds)
            exam = exam_over(kind, self.tokenizer, ids[k].tolist(), self.keys, rng, questions=self.keys)
            ids[k] = torch.tensor(exam.ids)
            answered = torch.tensor(exam.answered[1:], dtype=torch.float32)
            weights[k] = answered / (self.batch * answered.sum())
        return ids, weights


def learning_rate(step: int, steps: int) -> float:
    """Linear warmup, then a cosine down to the last rate."""
    warmup = max(round(WARMUP_SHARE * steps), 1)
    if step < warmup:
        return PEAK_LR * (step + 1) / warmup
    return LAST_LR + (PEAK_LR - LAST_LR) * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))) / 2


def drawn_model(seed: int, vocabulary: int, args: argparse.Namespace) -> Any:
    """A model before training, float32."""
    torch.manual_seed(seed)
    config = LlamaConfig(**{**SHAPE, "vocab_size": vocabulary, "max_position_embeddings": args.window, **args.override})
    return LlamaForCausalLM._from_config(config, attn_implementation="sdpa", dtype=torch.float32)


class Training:
    """One arm and seed: model, optimizer and how far they are.

    Args:
        model: float32 weights that it starts from, on the device, where they are multiplied in bf16.
        arm: what is trained.
        seed: of rows, exams and views.
        args: of the study.
        stream: ids of the text, on the CPU.
        tokenizer: for exams; None where there are none.
        file: that keeps a run which is cut off, and that it goes on from if it is there; None keeps nothing.
    """

    def __init__(
        self,
        model: Any,
        arm: Arm,
        seed: int,
        args: argparse.Namespace,
        stream: torch.Tensor,
        tokenizer: Any = None,
        file: Path | None = None,
    ) -> None:
        self.model, self.arm, self.seed, self.args, self.file = model, arm, seed, args, file
        self.device = model.device
        patch_model(self.model, arm.view, seed=seed, **arm.options)
        matrices = [p for p in self.model.parameters() if p.ndim > 1]
        vectors = [p for p in self.model.parameters() if p.ndim == 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
            betas=(0.9, 0.95),
            fused=self.device.type == "cuda",
        )
        from_scratch = max(round(args.tokens / (args.batch * args.window)), 1)
        self.steps = max(round(arm.steps * from_scratch), 1)
        # what starts from another arm's weights reads on where that one ended
        first = 0 if arm.after is None else from_scratch * args.batch
        rows = Rows(stream, args.window, seed)
        self.data = Steps(rows, first, args.batch, args.mix, args.kinds, args.keys, tokenizer)
        self.step, self.seconds, self.timed_steps, self.peak = 0, 0.0, 0, 0
        self.log: list[dict[str, float]] = []
        if self.file is not None and self.file.is_file():
            self._load(self.file)

    def train(self, deadline: Deadline) -> bool:
        """Go on to the last step; False if time was up before, and what there is was kept."""
        model, args, source = self.model.train(), self.args, view_source(self.model)
        assert source is not None
        if not args.eager:
            for layer in model.model.layers:
                # not the hooks around it, in which views are; all layers share one graph
                layer.forward = torch.compile(layer.forward, dynamic=False, fullgraph=True)
        first = self.step
        losses: list[torch.Tensor] = []
        # exams take as long as a small model's step: they are made beside it
        workers = args.workers if self.data.exams else 0
        steps = iter(DataLoader(self.data, None, sampler=range(first, self.steps), num_workers=workers))
        while self.step < self.steps:
            if not deadline.leaves(0):
                self._save()
                return False
            begin = time.perf_counter()
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate(self.step, self.steps)
            ids, weights = (t.to(self.device) for t in next(steps))
            of_rows = []
            for number, micro in enumerate(ids.split(args.micro_batch)):
                source.clock.set(self.step, number * args.micro_batch, self.step / self.steps)
                with autocast(self.model):
                    hidden = model.model(input_ids=micro[:, :-1], use_cache=False).last_hidden_state
                    weight = weights[number * args.micro_batch :][: len(micro)].flatten()
                    labels = micro[:, 1:].flatten()
                    loss, metrics = head_losses(model, hidden.flatten(0, 1), None, labels, weight, None)
                loss.backward()
                of_rows.append((metrics.ce * weight).view(len(micro), -1).sum(1))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.step += 1
            losses.append(torch.cat(of_rows))
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            if self.step - first > WARM_UP:
                self.seconds += time.perf_counter() - begin
                self.timed_steps += 1
            if self.step % args.log_steps == 0 or self.step == self.steps:
                self._log(torch.stack(losses).mean(0))
                losses.clear()
        return True

    def end(self) -> Any:
        """The trained model, for other shapes too, which compiled layers would compile anew for."""
        for layer in self.model.model.layers:
            layer.__dict__.pop("forward", None)
        return self.model.eval()

    def figures(self) -> dict[str, Any]:
        """What is known of training alone."""
        args, tokens = self.args, self.args.batch * self.args.window
        return {
            "view": [self.arm.view, dict(self.arm.options)],
            "after": self.arm.after,
            "tokens": self.steps * tokens,
            "epochs": self.steps * args.batch / self.data.rows.a_epoch,
            "mix": args.mix,
            "tokens_per_second": self.timed_steps * tokens / self.seconds if self.timed_steps else None,
            "train_seconds": self.seconds,
            "peak_gib": self._peak() / GIB,
            "compiled": not args.eager,
            "log": self.log,
        }

    def plan(self) -> dict[str, Any]:
        """What a kept run must agree on to be gone on with."""
        args, names = self.args, ("batch", "window", "mix", "kinds", "keys")
        of_args = {name: getattr(args, name) for name in names}
        return {"steps": self.steps, "first": self.data.first, "stream": len(self.data.rows.stream), **of_args}

    def _log(self, of_rows: torch.Tensor) -> None:
        """Add the mean loss of the last steps, given that of each row of a step."""
        mean = of_rows.sum().item()
        if not math.isfinite(mean):
            raise FloatingPointError(f"view {self.arm.view!r}, seed {self.seed}: loss {mean} by step {self.step}.")
        entry = {"step": self.step, "loss": round(mean, 4)}
        if self.data.exams:
            entry["answers"] = round(of_rows[self.data.exams].mean().item() * len(of_rows), 4)
        self.log.append(entry)

    def _peak(self) -> int:
        return max(self.peak, torch.cuda.max_memory_allocated() if self.device.type == "cuda" else 0)

    def _save(self) -> None:
        if self.file is None:
            return
        self.file.parent.mkdir(parents=True, exist_ok=True)
        kept = {"plan": self.plan(), "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        counted = {"step": self.step, "seconds": self.seconds, "timed_steps": self.timed_steps, "log": self.log}
        with whole_file(self.file) as beside:
            torch.save({**kept, **counted, "peak": self._peak()}, beside)

    def _load(self, file: Path) -> None:
        kept = torch.load(file, map_location=self.device, weights_only=True)
        if kept["plan"] != self.plan():
            raise ValueError(f"{file} holds a run with {kept['plan']}, not {self.plan()}: remove it.")
        self.model.load_state_dict(kept["model"])
        self.optimizer.load_state_dict(kept["optimizer"])
        for name in ("step", "seconds", "timed_steps", "log", "peak"):
            setattr(self, name, kept[name])
