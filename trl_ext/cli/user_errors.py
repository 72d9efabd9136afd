"""What a user can mend is said in one line, without a traceback. Imports nothing heavy."""

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
"""By which this package, Transformers, TRL and datasets refuse; OSError: a model or a file that is not there;
FloatingPointError: a loss that is no number."""

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
"""Package, as it is imported or called in messages -> the extra of this one that installs it."""

FLAGS = {
    "Seed must be": "--seed",
    "Got warmup_steps": "--warmup_steps",
    "Invalid learning rate": "--learning_rate",
    "Invalid beta parameter at index 0": "--adam_beta1",
    "Invalid beta parameter at index 1": "--adam_beta2",
    "Invalid epsilon": "--adam_epsilon",
    "num_workers option": "--dataloader_num_workers",
    "`r` should be": "--lora_r",
}
"""How the message of a library begins that refuses a value of a recipe -> the flag that it is from."""

_TRACEBACK = "ROPE_PATCH_TRACEBACK"


def run_command(command: str, run: Callable[[], int | None]) -> int:
    """Run one command; its status, or 2 after an error that the user can mend, which is printed in one line.

    With ROPE_PATCH_TRACEBACK=1 in the environment the error is raised, which shows where it comes from. A rank that a
    command has started prints neither message nor traceback, which that command does for all of them.
    """
    try:
        with warnings.catch_warnings():
            # what one library is to change in its calls of another is nothing that a user of a command can mend
            warnings.simplefilter("ignore", FutureWarning)
            return run() or 0
    except Exception as error:
        message = None if os.environ.get(_TRACEBACK, "0") not in ("", "0") else _message(error)
        if message is None and not is_started_rank():
            raise
        text = f"{command}: {message} ({_TRACEBACK}=1 shows where this comes from.)"
        if not is_started_rank():
            _tell(text)
            return USER_ERROR
        status = 1 if message is None else USER_ERROR
        leave_failure(traceback.format_exc().rstrip() if message is None else text, status)
        return status


def _tell(text: str) -> None:
    """Print a line on stderr, in place of the bar of progress that stands there and not behind it."""
    tqdm = sys.modules.get("tqdm")  # where it is not imported there is no bar
    with nullcontext() if tqdm is None else tqdm.tqdm.external_write_mode(sys.stderr):
        print(text, file=sys.stderr)


def _message(error: Exception) -> str | None:
    """What the user can mend, on one line; None for an error of the program."""
    if type(error).__name__ == "OutOfMemoryError":  # of torch, which is not imported for its name
        return "the GPU has too little memory: take shorter rows, smaller batches or adapters, or another GPU."
    if type(error).__module__ == "jinja2.exceptions":
        said = " ".join(str(error).split()).rstrip(".")
        return (
            f"the tokenizer's chat template (chat_template.jinja, or in tokenizer_config.json) stops: {said}. Mend it."
        )
    if not isinstance(error, USER_ERRORS) and not _names_what_to_install(error):
        return None
    text = " ".join(str(error).split())
    if isinstance(error, ImportError):
        return _with_remedy(error, text)
    flag = next((flag for words, flag in FLAGS.items() if text.startswith(words)), None)
    return f"{flag}: {text}" if flag else text or type(error).__name__


def _names_what_to_install(error: Exception) -> bool:
    """Whether it is of a package that is not there: Transformers raises RuntimeError for those it logs to."""
    return isinstance(error, RuntimeError) and "pip install" in str(error)


def _with_remedy(error: ImportError, text: str) -> str:
    """What is missing, and what to install."""
    package = (error.name or "").partition(".")[0]
    if package in EXTRAS:
        return f"this needs the package {package}, which is not installed: pip install 'rope-patch[{EXTRAS[package]}]'."
    named = [extra for name, extra in EXTRAS.items() if re.search(rf"\b{name}\b", text.lower())]
    if "pip install" in text or not named:
        return text or type(error).__name__
    return f"{text.rstrip('.')}. pip install 'rope-patch[{named[0]}]' installs it."
