"""Print mistakes of users in one line, without a traceback. Imports nothing heavy."""

import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import nullcontext

from ..engines.rank_failures import is_started_rank, leave_failure
from .parsing import USER_ERROR

USER_ERRORS = (ValueError, OSError, ImportError, FloatingPointError)
"""What this package, Transformers, TRL and datasets raise for mistakes of users. OSError is also for a missing model or
file, FloatingPointError for a loss that is NaN or infinite."""

EXTRAS = {
    "trl": "trl",
    "datasets": "trl",
    "accelerate": "trl",
    "peft": "peft",
    "bitsandbytes": "quantization",
    "flash_attn": "flash",
    "flashattention2": "flash",  # as Transformers calls it
    "deepspeed": "deepspeed",
    "lm_eval": "eval",
    "jinja2": "eval",
    "matplotlib": "plots",
    "gguf": "demo",
}
"""Package, as it is imported or as messages name it -> the extra of rope-patch that installs it."""

FLAGS = {
    "Seed must be": "--seed",
    "Got warmup_steps": "--warmup-steps",
    "Invalid learning rate": "--learning-rate",
    "Invalid beta parameter at index 0": "--adam-beta1",
    "Invalid beta parameter at index 1": "--adam-beta2",
    "Invalid epsilon": "--adam-epsilon",
    "num_workers option": "--dataloader-num-workers",
    "`r` should be": "--lora-r",
}
"""Beginning of a library's message about a wrong value in a recipe -> the flag of that value."""

_TRACEBACK = "ROPE_PATCH_TRACEBACK"


def run_command(command: str, run: Callable[[], int | None]) -> int:
    """Run one command and return its exit status: 2 after a mistake of the user, which is printed in one line.

    ROPE_PATCH_TRACEBACK=1 in the environment raises the error instead. A rank that a command has started leaves its
    message or traceback to that command, which prints one for all ranks.
    """
    try:
        with warnings.catch_warnings():
            # libraries warn of their calls of other libraries, which no user of a command can change
            warnings.simplefilter("ignore", FutureWarning)
            return run() or 0
    except Exception as error:
        message = None if os.environ.get(_TRACEBACK, "0") not in ("", "0") else _message(error)
        if message is None and not is_started_rank():
            raise
        text = f"{command}: {message} ({_TRACEBACK}=1 shows where this comes from.)"
        if not is_started_rank():
            tqdm = sys.modules.get("tqdm")
            # in a line of its own, not behind a progress bar; where tqdm is not imported there is no bar
            with nullcontext() if tqdm is None else tqdm.tqdm.external_write_mode(sys.stderr):
                print(text, file=sys.stderr)
            return USER_ERROR
        status = 1 if message is None else USER_ERROR
        leave_failure(traceback.format_exc().rstrip() if message is None else text, status)
        return status


def _message(error: Exception) -> str | None:
    """The mistake of the user, in one line; None for an error of the program."""
    if type(error).__name__ == "OutOfMemoryError":  # torch's, which is not imported for its name
        return "the GPU has too little memory: use shorter sequences, smaller batches or adapters, or another GPU."
    text = " ".join(str(error).split())
    if type(error).__module__ == "jinja2.exceptions":
        return (
            "the tokenizer's chat template (chat_template.jinja, or in tokenizer_config.json) fails: "
            f"{text.rstrip('.')}. Correct it."
        )
    # Transformers raises RuntimeError for a missing package that it would log to
    is_missing_package = isinstance(error, RuntimeError) and "pip install" in text
    if not isinstance(error, USER_ERRORS) and not is_missing_package:
        return None
    if isinstance(error, ImportError):
        return _with_remedy(error, text)
    flag = next((flag for words, flag in FLAGS.items() if text.startswith(words)), None)
    return f"{flag}: {text}" if flag else text or type(error).__name__


def _with_remedy(error: ImportError, text: str) -> str:
    """The missing package, and how to install it."""
    package = (error.name or "").partition(".")[0]
    if package in EXTRAS:
        return f"this needs the package {package}, which is not installed: pip install 'rope-patch[{EXTRAS[package]}]'."
    named = [extra for name, extra in EXTRAS.items() if re.search(rf"\b{name}\b", text.lower())]
    if "pip install" in text or not named:
        return text or type(error).__name__
    return f"{text.rstrip('.')}. pip install 'rope-patch[{named[0]}]' installs it."
