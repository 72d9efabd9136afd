"""Two steps of every objective, view and rescaling on tiny models, to show that a change leaves all numbers alone.

    python tests/support/small_runs.py OUT.json                  writes losses, and digests of gradients and weights
    python tests/support/small_runs.py --compare A.json B.json   prints the runs that differ, and exits with 1

Numbers are those of one machine and one version of torch: both files come from the same environment.
"""

# ruff: noqa: E402  # paths and environment come before the imports that read them

import hashlib
import json
import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

os.environ.update(CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1", HF_HUB_DISABLE_PROGRESS_BARS="1")
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "tests")]

import datasets
import torch
import transformers
from peft import LoraConfig
from support.tiny import MIXED, gemma3, tiny, tokens
from support.training import documents, trainer
from torch.nn import functional as F  # noqa: N812
from transformers import TrainerCallback

from rope_patch import patch_model
from rope_patch.patch import view_source
from rope_patch.views import Cycling, Discrete, Linear, LogUniform, Step, Uniform

MODELS = {"llama": tiny, "qwen3": lambda: tiny("qwen3", **MIXED), "gemma3": gemma3}
PACKED = {"packing": True, "max_length": 64, "per_device_train_batch_size": 1}
FREE = {"padding_free": True, "max_length": None, "packing_strategy": "bfd"}
TWO = {"gradient_accumulation_steps": 2}
WHOLE = {"gradient_checkpointing": False}  # the default is on
SKIP: dict[str, Any] = {"view": "skip", "view_args": {"skip": {"law": "uniform", "high": 90}}}
SELF = {"objective": "self-distill", **SKIP}
PI = {"rescale": "pi", "rescale_args": {"factor": 4.0}}
YARN = {"rescale": "yarn", "rescale_args": {"factor": 4.0}}
RELATION = {"objective": "relation-distill", **YARN}
HIDDEN = {"objective": "hidden-distill", **PI}
NATIVE = {"objective": "native-distill", **YARN, **SKIP}
LONGCE = {"short_context": 8, "stride": 4, "cap": 1.5}
CUE = {"view": "endprompt", "view_args": {"target": 200}, "cue": "word", "max_length": 32, **PI}
HALF = {"n_labels": 6}

# name: options of RopeSFTConfig; `model`, `lora` and `data` (options of `documents`) are not among them
TRAINED: dict[str, dict[str, Any]] = {
    "clm": {},
    "clm labels": {"data": HALF},
    "clm skip": SKIP,
    "clm skip packed": {**SKIP, **PACKED},
    "clm skip padding-free": {**SKIP, **FREE},
    "clm skip accumulated": {**SKIP, **TWO},
    "clm skip without checkpoints": {**SKIP, **WHOLE},
    "clm skip lora": {**SKIP, **YARN, "lora": True},
    "clm skip qwen3": {**SKIP, "model": "qwen3"},
    "clm skip gemma3": {**SKIP, "model": "gemma3"},
    "clm skip linear": {
        "view": "skip",
        "view_args": {"skip": {"law": "uniform", "high": 90, "curriculum": "linear", "start": 4}},
    },
    "clm posaug step": {
        "view": "posaug",
        "view_args": {"alpha": {"law": "uniform", "low": 0.125, "high": 8.0, "curriculum": "step", "until": 0.9}},
        **TWO,
    },
    "clm skip seed": {**SKIP, "view_seed": 7},
    "clm split": {**SKIP, "long_documents": "split", "max_length": 10},
    "clm wrapped": {**PACKED, "packing_strategy": "wrapped", **SKIP},
    "clm pose window": {"view": "pose", "view_args": {"target": 128, "window": 10}, **PI},
    "clm dft": {"loss_type": "dft", **SKIP},
    "clm smoothed": {"label_smoothing_factor": 0.1, **SKIP},
    "clm qkv": {"trainable": "qkv", **YARN},
    "clm shifted": {"shifted_attention": 0.25, "max_length": 16, **PI},
    "clm long rows": {"long_rows": "on", **SKIP},
    "clm longce": {"objective_args": {"longce": LONGCE}, **SKIP},
    "clm longce packed": {"objective_args": {"longce": LONGCE}, **PACKED},
    "clm cue": {**CUE},
    "clm cue weight": {**CUE, "objective_args": {"cue_weight": 3.0}},
    "clm endprompt": {"view": "endprompt", "view_args": {"target": 200, "cue_tokens": 4}, **PI},
    "clm drope": {"rescale": "drop-rope"},
    "self": SELF,
    "self labels": {**SELF, "data": HALF},
    "self packed": {**SELF, **PACKED},
    "self padding-free": {**SELF, **FREE, **TWO},
    "self without checkpoints": {**SELF, **WHOLE},
    "self lora": {**SELF, **YARN, "lora": True},
    "self qwen3": {**SELF, "model": "qwen3"},
    "self gemma3": {**SELF, "model": "gemma3"},
    "self posaug": {"objective": "self-distill", "view": "posaug", "objective_args": {"kl_weight": 0.3}},
    "self dft": {**SELF, "loss_type": "dft"},
    "self long rows": {**SELF, "long_rows": "on"},
    "self weight 0": {**SELF, "objective_args": {"kl_weight": 0.0}},
    "self w/ CLM": {**SELF, "objective_args": {"kl_weight": 0.0, "view_clm": 1.0}},
    **{
        f"self {name}": {**SELF, **TWO, "objective_args": {"kl_weight": 0.7, **options}}
        for name, options in {
            "forward": {"direction": "forward"},
            "jsd": {"direction": "jsd", "view_clm": 0.5},
            "query_in_suffix": {"rows": "query_in_suffix"},
            "token": {"reduction": "token"},
            "uniform": {"reduction": "uniform"},
            "kl_longce": {"kl_longce": LONGCE},
            "kl_top": {"kl_top": 0.3},
            "two": {"passes": "two"},
            "sequential": {"passes": "sequential"},
            "max_copies": {"max_copies": 0.6},
            "native": {"teacher": "native"},
        }.items()
    },
    "self native yarn": {**SELF, **YARN, "objective_args": {"teacher": "native"}},
    "self dropout": {"objective": "self-distill", "objective_args": {"control": {"kind": "dropout"}}},
    "self noise": {
        "objective": "self-distill",
        "objective_args": {"control": {"kind": "attention_noise", "strength": 0.3}},
    },
    "self longce": {**SELF, "objective_args": {"longce": LONGCE}},
    "self restored": {**SELF, **YARN, "objective_args": {"restore": {"every": 2}}},
    "relation": RELATION,
    "relation packed": {**RELATION, **PACKED},
    "relation padding-free": {**RELATION, **FREE},
    "relation accumulated": {**RELATION, **TWO},
    "relation without checkpoints": {**RELATION, **WHOLE},
    "relation lora": {**RELATION, "lora": True},
    "relation offloaded": {**RELATION, "teacher_offload": True},
    "relation qkv": {**RELATION, "trainable": "qkv"},
    "relation qwen3": {**RELATION, "model": "qwen3"},
    "relation gemma3": {**RELATION, "model": "gemma3"},
    **{
        f"relation {' '.join(options)}": {**RELATION, "objective_args": options}
        for options in (
            {"q": 0.0, "k": 0.0, "attention": 1.0},
            {"rope": "pre", "v": 0.0},
            {"denominator": "query_heads"},
            {"strip_attention_factor": True},
            {"divergence": "mse"},
            {"layers": [0, 2]},
        )
    },
    **{
        f"relation logit KL {' '.join(options)}": {**RELATION, **TWO, "objective_args": {"logit_kl": options}}
        for options in ({"weight": 0.0}, {"weight": 0.5, "last": 4}, {"weight": 0.5, "temperature": 2.0})
    },
    "hidden": HIDDEN,
    "hidden packed": {**HIDDEN, **PACKED},
    "hidden skip": {**HIDDEN, **SKIP, **TWO},
    "hidden far": {**HIDDEN, **SKIP, "objective_args": {"short_to_long": 10.0, "weight": 2.0, "layers": [1, 3]}},
    "hidden lora": {**HIDDEN, "lora": True},
    "native": NATIVE,
    "native labels": {**NATIVE, "data": HALF, **TWO},
    "native packed": {**NATIVE, **PACKED},
    "native lora": {**NATIVE, "lora": True},
    "native text": {**NATIVE, "data": HALF, "objective_args": {"text_weight": 0.5, "clm_weight": 0.0}},
    "native weight 0": {**NATIVE, "objective_args": {"weight": 0.0, "clm_weight": 1.0}},
    "native reverse": {**NATIVE, "objective_args": {"direction": "reverse", "temperature": 2.0}},
    "native jsd": {**NATIVE, "objective_args": {"direction": "jsd"}},
}

FACTOR = {"factor": 4.0}
LONG = {**FACTOR, "long_factor": [1.0, 1.5, 3.0, 4.0], "original_max_position_embeddings": 16}
PARTS = [{"view": "skip", "skip": Uniform(1, 90)}, {"view": "posaug", "alpha": Uniform(1 / 8, 4.0)}]

# name: a view or a rescaling, with its options; a step on padded rows, then one on packed rows
PATCHED: dict[str, tuple[str, dict[str, Any]]] = {
    "standard": ("standard", {}),
    "nope": ("nope", {}),
    "skip": ("skip", {}),
    "skip fixed": ("skip", {"split": 4, "skip": -9}),
    "skip log-uniform": ("skip", {"skip": LogUniform(1, 90)}),
    "skip split": ("skip", {"split": 5, "skip": Uniform(1, 90)}),
    "skip until": ("skip", {"skip": Step(Uniform(1, 90), 0.7)}),
    "posaug": ("posaug", {}),
    "posaug log-uniform": ("posaug", {"alpha": LogUniform(1 / 8, 8.0), "granularity": "sample"}),
    "posaug discrete": ("posaug", {"alpha": Discrete([1.0, 2.0, 4.0, 8.0]), "granularity": "micro-batch"}),
    "posaug cycling": ("posaug", {"alpha": Cycling([3.0, 1.0, 0.5])}),
    "posaug linear": ("posaug", {"alpha": Linear(Uniform(0.5, 3.0), [0.9, 1.1])}),
    "dilation": ("dilation", {"factor": Uniform(1.5, 2.0)}),
    "cyclic": ("cyclic", {}),
    "cyclic fixed": ("cyclic", {"shift": 3}),
    "chunk-permute": ("chunk-permute", {"blocks": 3}),
    "cream": ("cream", {"target": 200}),
    "cream sigma": ("cream", {"target": 200, "sigma": 3.0}),
    "cream uniform": ("cream", {"target": 200, "sigma": None}),
    "pose": ("pose", {"target": 200}),
    "pose chunks": ("pose", {"target": 200, "chunks": 4}),
    "longrecipe": ("longrecipe", {"target": 200, "sentence_ends": list(range(3, 30))}),
    "endprompt": ("endprompt", {"target": 200, "cue_tokens": 4, "placement": "random"}),
    "rpe": ("rpe", {}),
    "rpe sample": ("rpe", {"max_index": 100, "granularity": "sample"}),
    "random-base": ("random-base", {}),
    "random-base log": ("random-base", {"factor": LogUniform(0.5, 4.0)}),
    "mix": ("mix", {"views": ["standard", *PARTS], "shares": [0.2, 0.5, 0.3]}),
    "compose": ("compose", {"views": PARTS}),
    "per-layer": ("per-layer", {"view": PARTS[0]}),
    "per-layer top": ("per-layer", {"view": PARTS[1], "layers": "top"}),
    "per-layer indices": ("per-layer", {"view": PARTS[0], "layers": [0, 2]}),
    "abf": ("abf", {"theta": 5e5}),
    "ntk": ("ntk", FACTOR),
    "dynamic-ntk": ("dynamic-ntk", {"factor": 4.0}),
    "pi": ("pi", {**FACTOR, "rope_theta": 5e4}),
    "drop-rope": ("drop-rope", {"max_position_embeddings": 256}),
    "llama3": ("llama3", FACTOR),
    "llama3 all": ("llama3", {**FACTOR, "low_freq_factor": 0.5, "high_freq_factor": 2.0, "rope_theta": 5e4}),
    "longrope": ("longrope", LONG),
    "longrope all": ("longrope", {**LONG, "short_factor": [1.0, 1.1, 1.2, 1.3], "attention_factor": 1.3}),
    "yarn": ("yarn", FACTOR),
    "yarn ends": ("yarn", {**FACTOR, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False, "attention_factor": 1.5}),
    "yarn mscale": ("yarn", {**FACTOR, "mscale": 0.7, "mscale_all_dim": 0.4, "original_max_position_embeddings": 32}),
}
NOT_NUMBERS = ("runtime", "per_second", "total_flos", "_seconds", "_gib", "memory")


def digest(tensors: dict[str, torch.Tensor]) -> str:
    """SHA-256 of names and bytes."""
    sha = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        sha.update(name.encode())
        sha.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def gradients(model: torch.nn.Module) -> str:
    """Digest of those that there are."""
    return digest({name: p.grad for name, p in model.named_parameters() if p.grad is not None})


class Gradients(TrainerCallback):
    """A digest of the gradients of each step."""

    def __init__(self) -> None:
        self.digests: list[str] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.digests.append(gradients(model))


def train(model: str = "llama", lora: bool = False, data: dict[str, Any] | None = None, **options: Any) -> dict:
    """Two steps of `RopeSFTTrainer`, then an evaluation."""
    seen = Gradients()
    if lora:
        options["peft_config"] = LoraConfig(target_modules="all-linear", r=2, lora_dropout=0.0)
    with tempfile.TemporaryDirectory() as folder:
        run = trainer(
            Path(folder),
            model=MODELS[model](),
            train_dataset=documents(12, **(data or {})),
            eval_dataset=documents(4, seed=1, **(data or {})),
            **{"max_steps": 2, "gradient_checkpointing": True, **options},
        )
        run.add_callback(seen)
        run.train()
        run.evaluate()
    entries = [
        {name: repr(value) for name, value in entry.items() if not any(part in name for part in NOT_NUMBERS)}
        for entry in run.state.log_history
    ]
    return {"gradients": seen.digests, "log": entries, "weights": digest(dict(run.model.state_dict()))}


def patch(method: str, options: dict[str, Any]) -> dict[str, Any]:
    """Two forwards with their gradients, and the weights after a step along each."""
    model = patch_model(tiny(), method, **options).train()
    ids, mask = tokens(3, 24), torch.ones(3, 24, dtype=torch.long)
    mask[1, 15:] = mask[2, 9:] = 0
    positions = torch.cat([torch.arange(n) for n in (70, 25, 17)])[None]
    batches = [{"input_ids": ids, "attention_mask": mask}, {"input_ids": tokens(1, 112), "position_ids": positions}]
    losses, digests = [], []
    for step, batch in enumerate(batches):
        if (source := view_source(model)) is not None:
            source.clock.set(step, 2 * step, progress=0.3 + 0.5 * step)
        logits = model(**batch, use_cache=False).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())
        loss.backward()
        losses.append(repr(loss.item()))
        digests.append(gradients(model))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
    return {"losses": losses, "gradients": digests, "weights": digest(dict(model.state_dict()))}


def main(arguments: list[str]) -> int:
    """Run all, or compare two files."""
    if arguments[0] == "--compare":
        first, second = (json.loads(Path(file).read_text()) for file in arguments[1:])
        names = sorted(name for name in {**first, **second} if first.get(name) != second.get(name))
        for name in names:
            parts = {**first.get(name, {}), **second.get(name, {})}
            there = name in first and name in second
            apart = (
                [part for part in parts if first[name].get(part) != second[name].get(part)] if there else ["missing"]
            )
            print(f"{name}: {', '.join(apart)}")
        print(f"{len(names)} of {len({**first, **second})} runs differ")
        return int(bool(names))
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    transformers.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    calls = {f"train {name}": partial(train, **options) for name, options in TRAINED.items()}
    calls |= {f"patch {name}": partial(patch, *method) for name, method in PATCHED.items()}
    runs: dict[str, Any] = {}
    for name, call in calls.items():
        torch.manual_seed(0)
        try:
            runs[name] = call()
        except Exception as error:
            print(f"{name}: {error}")
    Path(arguments[0]).write_text(json.dumps(runs, indent=1, sort_keys=True) + "\n")
    print(f"{len(runs)} of {len(calls)} runs")
    return int(len(runs) < len(calls))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
