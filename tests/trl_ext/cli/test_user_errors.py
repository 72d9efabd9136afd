"""Mistakes of users are one line; errors of the program keep their traceback."""

import tomllib
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.characters import chat_tokenizer
from support.tiny import tiny
from torch.optim import AdamW
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import TrainingArguments

from trl_ext.cli.user_errors import EXTRAS, run_command
from trl_ext.engines import rank_failures

WEIGHT = torch.nn.Parameter(torch.zeros(1))


def raising(error):
    def run():
        raise error

    return run


@pytest.mark.parametrize("error", [ValueError("a\n  b"), OSError("a b"), ImportError("a b"), FloatingPointError("a b")])
def test_a_mistake_is_one_line_and_ends_with_2(error, capsys):
    assert run_command("tool", raising(error)) == 2
    assert capsys.readouterr().err == "tool: a b (ROPE_PATCH_TRACEBACK=1 shows where this comes from.)\n"


def test_a_mistake_stands_in_a_line_of_its_own_where_a_bar_of_progress_was(capsys):
    with tqdm(total=3):
        assert run_command("tool", raising(ValueError("a b"))) == 2
    assert "tool: a b (ROPE_PATCH_TRACEBACK=1 shows where this comes from.)" in capsys.readouterr().err.splitlines()


@pytest.mark.parametrize(
    "error", [TypeError("x"), KeyError("x"), AttributeError("x"), RuntimeError("x"), AssertionError()]
)
def test_an_error_of_the_program_is_raised(error, capsys):
    with pytest.raises(type(error)):
        run_command("tool", raising(error))
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ ''.__class__.__mro__ }}", "access to attribute '__class__' of 'str' object is unsafe"),
        ("{% for m in messages %}", "Unexpected end of template"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
    ],
    ids=["out of the sandbox", "damaged", "other chats"],
)
def test_a_chat_template_that_stops_is_a_mistake_too(template, says, capsys):
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = template
    run = partial(tokenizer.apply_chat_template, [{"role": "user", "content": "a"}], tokenize=False)
    assert run_command("tool", run) == 2
    assert "tool: the tokenizer's chat template (chat_template.jinja, or in tok" in (told := capsys.readouterr().err)
    assert says in told


def test_too_little_memory_is_a_matter_of_the_run(capsys):
    assert run_command("tool", raising(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate ..."))) == 2
    assert "tool: the GPU has too little memory: use shorter sequences" in capsys.readouterr().err


def test_the_traceback_is_shown_on_request(monkeypatch):
    monkeypatch.setenv("ROPE_PATCH_TRACEBACK", "1")
    with pytest.raises(ValueError, match="x"):
        run_command("tool", raising(ValueError("x")))


def test_a_rank_leaves_its_failure_to_the_command_that_started_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(rank_failures.FOLDER, str(tmp_path))
    for rank, error, status in ((1, RuntimeError("a disk is gone"), 1), (0, ValueError("a\nb"), 2)):
        monkeypatch.setenv("RANK", str(rank))
        assert run_command("tool", raising(error)) == status
    assert not any(capsys.readouterr())
    first = rank_failures.RankFailure.first(tmp_path)
    assert (first.rank, first.status) == (1, 1)
    assert first.text.startswith("Traceback") and first.text.endswith("\nRuntimeError: a disk is gone")
    (tmp_path / "rank-1.json").unlink()
    assert rank_failures.RankFailure.first(tmp_path).text.startswith("tool: a b (ROPE_PATCH_TRACEBACK=1")


def test_what_libraries_are_to_change_is_not_told(recwarn):
    def run():
        warnings.warn("gone in v6", FutureWarning, stacklevel=1)
        warnings.warn("of use to the user", UserWarning, stacklevel=1)
        return 3

    assert run_command("tool", run) == 3
    assert [str(w.message) for w in recwarn] == ["of use to the user"]


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            ModuleNotFoundError("No module named 'peft.tuners'", name="peft.tuners"),
            "this needs the package peft, which is not installed: pip install 'rope-patch[peft]'.",
        ),
        (
            ImportError("Please install torch and gguf>=0.10.0 to load a GGUF checkpoint in PyTorch."),
            "Please install torch and gguf>=0.10.0 to load a GGUF checkpoint in PyTorch. "
            "pip install 'rope-patch[demo]' installs it.",
        ),
        (
            ImportError("FlashAttention2 has been toggled on: the package doesn't seem to be installed."),
            "FlashAttention2 has been toggled on: the package doesn't seem to be installed. "
            "pip install 'rope-patch[flash]' installs it.",
        ),
        (ImportError("pip install -U bitsandbytes>=0.46.1"), "pip install -U bitsandbytes>=0.46.1"),
        (ModuleNotFoundError("No module named 'tables'", name="tables"), "No module named 'tables'"),
        (RuntimeError("It requires wandb. Run `pip install wandb`."), "It requires wandb. Run `pip install wandb`."),
    ],
    ids=["of this package", "in words", "as others call it", "told already", "of another package", "of a log"],
)
def test_a_missing_package_is_told_with_what_installs_it(error, told, capsys):
    assert run_command("tool", raising(error)) == 2
    assert capsys.readouterr().err.startswith(f"tool: {told} (")


@pytest.mark.parametrize(
    ("flag", "refused"),
    [
        ("--seed", lambda: np.random.seed(-1)),
        ("--warmup-steps", lambda: TrainingArguments("out", warmup_steps=-1, use_cpu=True)),
        ("--learning-rate", lambda: AdamW([WEIGHT], lr=-1.0)),
        ("--adam-beta1", lambda: AdamW([WEIGHT], betas=(2.0, 0.9))),
        ("--adam-beta2", lambda: AdamW([WEIGHT], betas=(0.9, 2.0))),
        ("--adam-epsilon", lambda: AdamW([WEIGHT], eps=-1.0)),
        ("--dataloader-num-workers", lambda: DataLoader([], num_workers=-1)),
        ("--lora-r", lambda: get_peft_model(tiny(), LoraConfig(r=0, target_modules=["q_proj"]))),
    ],
)
def test_a_value_that_a_library_refuses_is_told_with_its_flag(flag, refused, capsys):
    assert run_command("tool", refused) == 2
    assert capsys.readouterr().err.startswith(f"tool: {flag}: ")


def test_every_extra_installs_what_it_is_named_for():
    metadata = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    extras = metadata["project"]["optional-dependencies"]
    for package, extra in EXTRAS.items():
        listed = " ".join(extras[extra]).lower().replace("-", "_")
        assert package in listed or package == "flashattention2", f"{extra} does not install {package}"
