"""What every test starts from: offline, seeded, on as many threads as it may use, with no luck in fresh memory."""

import functools
import gc
import importlib
import logging
import os
import re
import subprocess
import sys
import time
import zlib
from pathlib import Path
from types import SimpleNamespace

# before anything imports huggingface_hub, which reads these once
os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", CI="1")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS warns in deterministic mode without it

import pytest
import torch

TESTS = Path(__file__).parent
LOGGERS = [logging.getLogger(name) for name in ("rope_patch", "trl_ext", "transformers")]
HAS_CUDA = torch.cuda.is_available()
if not HAS_CUDA:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before any test imports triton, which reads it once
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)


@functools.cache
def names_tested(file):
    """Of a test file with dashes, and what the module that it tests registers: pi for test_interpolation.py."""
    stem = file.stem.removeprefix("test_")
    module = TESTS.parent / file.parent.relative_to(TESTS) / f"{stem}.py"
    registered = re.findall(r'\.register\("(.+)"\)', module.read_text()) if module.exists() else []
    return {stem.replace("_", "-"), *registered}


def pytest_addoption(parser):
    parser.addoption(
        "--until",
        type=float,
        default=float("inf"),
        metavar="TIME",
        help="skip tests that would begin after it, in seconds since 1970",
    )
    parser.addoption(
        "--first-of",
        metavar="COMMIT",
        help="run those tests first whose file, or the file that it mirrors, has changed since",
    )


def pytest_runtest_setup(item):
    if time.time() > item.config.getoption("until"):
        pytest.skip("no time left for it (--until)")


def pytest_itemcollected(item):
    """`-k per-layer` finds test_per_layer.py too, `-k pi` test_interpolation.py."""
    item.extra_keyword_matches.update(names_tested(item.path))


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Imports make no garbage: without collections of it they take a quarter less time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish():
    """Leave what is imported by now out of garbage collections, of which trainers run many: half a second each.

    And let the process that checks an export be forked from one that has Transformers loaded, which saves 5 seconds.
    """
    if "rope_patch" in sys.modules and not HAS_CUDA:
        from support.launched import run_python

        reloading = importlib.import_module("rope_patch.export.reloading")
        reloading.subprocess = SimpleNamespace(run=lambda command, cwd, **_: run_python(*command[1:], cwd=cwd))
    gc.collect()
    gc.freeze()


def git(*command):
    return subprocess.run(["git", *command], cwd=TESTS.parent, capture_output=True, text=True).stdout


def put_first(items, commit):
    """Tests of files that have changed since a commit, or that mirror one that has; then files in another order each.

    So whatever a bound of time leaves out is not the same after every commit.
    """
    files = [Path(file) for file in git("diff", "--name-only", "-z", commit).split("\0")]
    mirrored = [Path(str(file).removeprefix("kernels/rope_")) for file in files]
    changed = {*files, *("tests" / file.parent / f"test_{file.name}" for file in mirrored)}
    now = git("rev-parse", "HEAD")
    paths = {item.path: item.path.relative_to(TESTS.parent) for item in items}
    order = {path: (name not in changed, zlib.crc32(f"{now}{name}".encode())) for path, name in paths.items()}
    items.sort(key=lambda item: order[item.path])


def pytest_collection_modifyitems(config, items):
    if config.getoption("first_of"):
        put_first(items, config.getoption("first_of"))
    if HAS_CUDA:
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def fresh_state():
    """Seed, and fill `torch.empty` with NaN, so that a value nobody wrote shows; put log levels back at the end.

    One fixture and not three, as each costs half a millisecond a test. Scripts that a test runs in this process quiet
    loggers for good, and a later test waits for their warnings.
    """
    # without a GPU torch.manual_seed notes its call stack for each kind of device, a millisecond a test
    seed = torch.manual_seed if HAS_CUDA else torch.default_generator.manual_seed
    seed(0)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    levels = [logger.level for logger in LOGGERS]
    yield
    torch.use_deterministic_algorithms(False)
    for logger, level in zip(LOGGERS, levels, strict=True):
        logger.setLevel(level)


@pytest.fixture
def flex_runs_eagerly():
    """Compiled for a CPU, flex attention fails on some shapes, after some others."""
    with torch.compiler.set_stance("force_eager"):
        yield
