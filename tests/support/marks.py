"""Marks of tests that need what not every machine has."""

import shutil
from importlib.metadata import version
from importlib.util import find_spec

import pytest
import torch
import transformers
from packaging.version import Version
from transformers.integrations import peft

BEFORE_5_17 = Version(transformers.__version__) < Version("5.17")

needs_ranks = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
needs_deepspeed = pytest.mark.skipif(
    find_spec("deepspeed") is None or shutil.which("c++") is None,
    reason="needs DeepSpeed, pip install -e '.[deepspeed]', and a C++ compiler",
)
needs_own_adapters = pytest.mark.skipif(
    Version(version("peft")) < Version(peft.MIN_PEFT_VERSION),
    reason=f"Transformers adds adapters, and generates behind prefixes, with PEFT from {peft.MIN_PEFT_VERSION} on",
)
