"""A Transformers 4 beside the installed one, for what it makes of our checkpoints."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

VERSION = "4.57.6"
# what it needs of other versions than the installed ones; torch and the rest are shared
_PACKAGES = (f"transformers=={VERSION}", "huggingface_hub==0.36.0", "tokenizers==0.22.1")


def older_transformers() -> Path:
    """The folder that it is installed in, once for all runs of the tests. Skips the test where no index is reached."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "rope-patch-tests"
    folder = cache / f"transformers-{VERSION}"
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(dir=cache))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(fresh), *_PACKAGES]
    done = subprocess.run(pip, capture_output=True, text=True)
    if done.returncode:
        shutil.rmtree(fresh)
        pytest.skip(f"Transformers {VERSION} could not be installed: {done.stderr.strip().splitlines()[-1]}")
    try:
        fresh.rename(folder)
    except OSError:  # another run was faster
        shutil.rmtree(fresh)
    return folder


def run_with_older_transformers(code: str, *arguments: str) -> str:
    """What `python -c code arguments...` prints where `transformers` is the older one and our packages are not."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"PYTHONPATH": str(older_transformers()), "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as elsewhere:
        done = subprocess.run(
            [sys.executable, "-P", "-c", code, *arguments],
            cwd=elsewhere, env=environment, capture_output=True, text=True, timeout=600,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout
