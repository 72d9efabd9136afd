"""What the trainer tests share: a word-level tokenizer, a dataset of random ids, short runs."""

import functools
import random
from pathlib import Path

from accelerate.utils import imports
from datasets import Dataset
from datasets.utils.logging import disable_progress_bar
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from trl_ext import RopeSFTConfig, RopeSFTTrainer

from .tiny import VOCAB, tiny

disable_progress_bar()
# a trainer looks up several times whether PEFT is installed, and each look-up parses its metadata
imports._is_package_available = functools.cache(imports._is_package_available)

# ways to batch the same four documents in a step
WAYS = {
    "padded": {"per_device_train_batch_size": 4},
    "accumulated": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4},
    "mixed": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
    "padding-free": {"per_device_train_batch_size": 4, "padding_free": True, "max_length": None},
    "packed": {"per_device_train_batch_size": 1, "packing": True, "max_length": 4 * 24},
    "checkpointed": {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "gradient_checkpointing": True,
    },
}


def tokenizer() -> PreTrainedTokenizerFast:
    """Every id is a word; ids 0, 1, 2 are special."""
    words = {"<pad>": 0, "<bos>": 1, "<eos>": 2, **{f"w{i}": i for i in range(3, VOCAB)}}
    core = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")


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
        "output_dir": str(output_dir),
        "max_steps": 4,
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "save_strategy": "no",
        "disable_tqdm": True,
        "max_length": 64,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "dataset_num_proc": None,
        "gradient_checkpointing": options.get("long_rows") == "on",  # TRL's default runs each layer twice
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
