"""What the trainer tests share: a word-level tokenizer, a dataset of random ids, short runs."""

import functools
import random
from pathlib import Path

from accelerate.utils import imports
from datasets import Dataset
from datasets.utils.logging import disable_progress_bar

from trl_ext import RopeSFTConfig, RopeSFTTrainer
from trl_ext.testing import SMALL_RUN
from trl_ext.testing import WAYS as WAYS
from trl_ext.testing import word_tokenizer as tokenizer

from .tiny import VOCAB, tiny

disable_progress_bar()
# a trainer looks up several times whether PEFT is installed, and each look-up parses its metadata
imports._is_package_available = functools.cache(imports._is_package_available)


def documents(n: int = 24, longest: int = 24, seed: int = 0, n_labels: int | None = None) -> Dataset:
    """`n` documents of 12 to `longest` random tokens, of which the first `n_labels` that can have a label do."""
    rng = random.Random(seed)
    rows = [[rng.randrange(3, VOCAB) for _ in range(rng.randrange(12, longest + 1))] for _ in range(n)]
    if n_labels is None:
        return Dataset.from_list([{"input_ids": row} for row in rows])
    end = n_labels + 1
    return Dataset.from_list([{"input_ids": x, "labels": [*x[:end], *[-100] * (len(x) - end)]} for x in rows])


def trainer(output_dir: Path, trainer_class=RopeSFTTrainer, config_class=RopeSFTConfig, model=None, **options):
    """A trainer of a tiny model; `options` go to the config, apart from those of the trainer itself."""
    added = {
        name: options.pop(name)
        for name in (
            "peft_config",
            "quantization_config",
            "data_collator",
            "eval_dataset",
            "processing_class",
            "compute_metrics",
        )
        if name in options
    }
    dataset = options.pop("train_dataset", None) or documents()
    settings = {
        **SMALL_RUN,
        "output_dir": str(output_dir),
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "gradient_checkpointing": options.get("long_rows") == "on",
        **({"long_documents": "split"} if options.get("cue") is not None else {}),
    }
    return trainer_class(
        model=tiny() if model is None else model,
        args=config_class(**{**settings, **options}),
        train_dataset=dataset,
        **{"processing_class": tokenizer(), **added},
    )


def logged(run, *names: str) -> list[dict[str, float]]:
    """The entries of a finished run's log, one a step."""
    steps = [entry for entry in run.state.log_history if "loss" in entry]
    return [{name: entry[name] for name in entry if name in names or name.startswith(names)} for entry in steps]
