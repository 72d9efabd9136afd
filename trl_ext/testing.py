"""What every objective promises, as a check for those of other packages; our own tests run the same."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rope_patch.testing.models import VOCABULARY, random_ids, small_model

from .config import RopeSFTConfig
from .trainer.trainer import RopeSFTTrainer

_LENGTHS = (24, 13, 20, 17)

SMALL_RUN: dict[str, Any] = {
    "logging_steps": 1,
    "report_to": [],
    "use_cpu": True,
    "bf16": False,
    "save_strategy": "no",
    "disable_tqdm": True,
    "max_length": 64,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,  # clipping would hide a gradient of another scale
    "dataset_num_proc": None,
    "gradient_checkpointing": False,  # TRL's default runs each layer twice
}
"""Settings of a run of some steps on a CPU, in which a step moves the weights far enough to be seen."""

WAYS: dict[str, dict[str, Any]] = {
    "padded": {"per_device_train_batch_size": 4},
    "accumulated": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4},
    "mixed": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
    "padding-free": {"per_device_train_batch_size": 4, "padding_free": True, "max_length": None},
    "packed": {"per_device_train_batch_size": 1, "packing": True, "max_length": 4 * max(_LENGTHS)},  # all in one row
    "checkpointed": {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "gradient_checkpointing": True,
    },
}
"""Ways to batch the same four documents in a step."""


def check_objective(**settings: Any) -> None:
    """Check what every objective promises: the tests that the objectives of this package pass, on a small model.

    - A step has the same loss, the same parts and the same gradients however its documents are batched: padded, packed,
      accumulated, with checkpointed layers. Packing is left out under a view, as it changes the order of documents, by
      which a view draws.
    - An evaluation has the same loss before and after another one, and leaves the weights as they are.
    - A run that stops after a step and is resumed ends with the weights of one that does not stop.

    Args:
        **settings: fields of `RopeSFTConfig`: objective, objective_args, and the view and rescaling that it needs. Of
            TRL's own loss, "clm" without options, TRL itself makes the parts.

    Raises:
        AssertionError: a promise that the objective does not keep.
        ValueError: settings that the objective refuses.
    """
    with tempfile.TemporaryDirectory() as folder:
        check_batching(Path(folder) / "batching", settings)
        check_evaluation(Path(folder) / "evaluation", settings)
        check_resuming(Path(folder) / "resuming", settings)


def check_batching(folder: Path, settings: Mapping[str, Any]) -> None:
    """A step has the same figures however its documents are batched."""
    steps = {}
    for way, batching in WAYS.items():
        run = trainer(folder, {**settings, **batching}, max_steps=1)
        if way == "packed" and run.args.make_view().perturbs:
            continue
        run.train()
        (steps[way],) = _logged(run)  # figures of the one step
    for way, step in steps.items():
        for name, value in steps["padded"].items():
            # not `>`: nan must fail
            if not abs(step.get(name, float("nan")) - value) <= 1e-4 * abs(value) + 1e-6:
                raise AssertionError(
                    f"{name} of a step is {value:.6g} in one batch and {step.get(name)} {way}: divide the sums of a "
                    "batch by the counts of the step."
                )


def check_evaluation(folder: Path, settings: Mapping[str, Any]) -> None:
    """Evaluations give the same loss each time and change nothing."""
    run = trainer(folder, {**settings, **WAYS["padded"]}, max_steps=1)
    before = _weights(run)
    first, second = (run.evaluate()["eval_loss"] for _ in range(2))
    if first != second:
        raise AssertionError(f"two evaluations give losses of {first} and {second}.")
    _require_same(_weights(run), before, "an evaluation changes")


def check_resuming(folder: Path, settings: Mapping[str, Any]) -> None:
    """A resumed run ends with the weights of one that does not stop."""
    batching = {**settings, **WAYS["accumulated"], "save_strategy": "steps", "save_steps": 1}
    whole = trainer(folder / "whole", batching, max_steps=2)
    whole.train()
    trainer(folder / "stopped", batching, max_steps=1).train()
    resumed = trainer(folder / "stopped", batching, max_steps=2)
    resumed.train(resume_from_checkpoint=True)
    _require_same(_weights(resumed), _weights(whole), "a run that was resumed ends with another")


def trainer(folder: Path, settings: Mapping[str, Any], **more: Any) -> RopeSFTTrainer:
    """A trainer of a small model on four documents of 13 to 24 tokens, which logs each step."""
    fixed = {**SMALL_RUN, "output_dir": str(folder), "train_sampling_strategy": "sequential"}
    ids = random_ids(len(_LENGTHS), max(_LENGTHS)).tolist()
    data = Dataset.from_list([{"input_ids": row[:n]} for row, n in zip(ids, _LENGTHS, strict=True)])
    args = RopeSFTConfig(**{**fixed, **settings, **more})
    return RopeSFTTrainer(
        model=small_model(), args=args, train_dataset=data, eval_dataset=data, processing_class=word_tokenizer()
    )


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Every ID is a word; IDs 0, 1 and 2 are special."""
    words = {"<pad>": 0, "<bos>": 1, "<eos>": 2, **{f"w{i}": i for i in range(3, VOCABULARY)}}
    core = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")


def _logged(run: RopeSFTTrainer) -> list[dict[str, float]]:
    """Figures of each step that training makes."""
    left_out = ("epoch", "step", "learning_rate")
    entries = [entry for entry in run.state.log_history if "loss" in entry]
    return [{name: value for name, value in entry.items() if name not in left_out} for entry in entries]


def _weights(run: RopeSFTTrainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in run.model.named_parameters()}


def _require_same(actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], what: str) -> None:
    for name, weight in expected.items():
        if not torch.equal(actual[name], weight):
            raise AssertionError(f"{what} {name}, by up to {(actual[name] - weight).abs().max().item():.1e}.")
