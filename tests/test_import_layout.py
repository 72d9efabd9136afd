"""Which imports pull in what, and that our folder `kernels/` never stands in for Hugging Face's `kernels`.

Each check runs in a new process, as this one has imported too much already.
"""

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers.utils.import_utils import KERNELS_MIN_VERSION

ROOT = Path(__file__).parents[1]

# What transformers imports of `kernels` changes often, so the stand-in has every name: a decorator that does nothing.
KERNELS_STAND_IN = """
IS_STAND_IN = True


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return lambda *args, **kwargs: lambda decorated: decorated
"""


def run_in_root(code, *, first_on_path=None):
    """Run `code` as `python -c` does, so that sys.path starts with the repository root, and return what it printed."""
    environment = os.environ | {"PYTHONPATH": str(first_on_path or "")}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def modules_added(code, *, after="pass"):
    """The top-level modules that `code` imports and `after` had not."""
    before, added = "before = set(sys.modules)", "{name.split('.')[0] for name in set(sys.modules) - before}"
    lines = ["import json, sys", after, before, code, f"print(json.dumps(sorted({added})))"]
    return set(json.loads(run_in_root("\n".join(lines)).splitlines()[-1]))


@pytest.fixture
def kernels_distribution(tmp_path):
    """A folder for sys.path with a distribution `kernels` of a version that transformers accepts."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text(KERNELS_STAND_IN)
    metadata = tmp_path / f"kernels-{KERNELS_MIN_VERSION}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: kernels\nVersion: {KERNELS_MIN_VERSION}\n")
    return tmp_path


@pytest.mark.slow
def test_transformers_imports_from_the_root_with_what_is_installed():
    installed = any(dist.name == "kernels" for dist in importlib.metadata.distributions())
    code = """
from transformers import LlamaForCausalLM
from transformers.utils import is_kernels_available
print(is_kernels_available())
"""
    available = run_in_root(code).split()[-1]
    assert available == "False" or installed


@pytest.mark.slow
def test_transformers_imports_from_the_root_with_a_kernels_distribution(kernels_distribution):
    code = """
from transformers import LlamaForCausalLM
from transformers.utils import is_kernels_available
import kernels
print(is_kernels_available(), kernels.IS_STAND_IN)
"""
    assert run_in_root(code, first_on_path=kernels_distribution).split()[-2:] == ["True", "True"]


@pytest.mark.slow
def test_rope_patch_adds_torch_and_transformers_only():
    added = modules_added("import rope_patch", after="import torch\nfrom transformers import PreTrainedModel")
    assert not added & {"triton", "trl", "peft", "datasets", "matplotlib", "lm_eval", "rope_kernels", "trl_ext"}


@pytest.mark.slow
def test_rope_kernels_adds_torch_only():
    added = modules_added("import rope_kernels", after="import torch")
    assert not added & {"triton", "transformers", "trl", "rope_patch", "trl_ext"}


@pytest.mark.slow
def test_objectives_do_not_import_the_config_that_lists_them():
    printed = run_in_root("import sys\nimport trl_ext.objectives\nprint('trl_ext.config' in sys.modules)")
    assert printed.splitlines()[-1] == "False"


def test_help_and_methods_are_shown_without_torch():
    # the flags of `eval` are declared by its measures, which import torch
    code = """
import sys
from importlib.metadata import entry_points
from trl_ext.cli.console import _parser
(command,) = set(entry_points(group="console_scripts", name="rope-patch"))
main = command.load()
(commands,) = [action.choices for action in _parser()._actions if action.dest == "command"]
light = {*commands} - {"eval"}
for arguments in [["--help"], *([name, "--help"] for name in light), ["methods"], ["methods", "self-distill"]]:
    try:
        status = main(arguments)
    except SystemExit as end:
        status = end.code
    assert not status, arguments
print(sorted({"torch", "transformers", "trl", "rope_patch"} & set(sys.modules)))
"""
    printed = run_in_root(code)
    assert printed.splitlines()[-1] == "[]"
    assert "usage: rope-patch extend" in printed and "self-distill, an objective" in printed


@pytest.mark.slow
def test_commands_do_not_show_that_bitsandbytes_lacks_a_kernel():
    pytest.importorskip("bitsandbytes")
    code = """
import sys
from trl_ext.cli import main
main(["methods", "skip"])
import peft
print(sys.modules["bitsandbytes.backends.cpu.ops"].logger.getEffectiveLevel())
"""
    assert run_in_root(code).splitlines()[-1] == "40", "ERROR, above the warning"
