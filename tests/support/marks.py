"""Marks of tests that need what not every machine has."""

import shutil
from importlib.util import find_spec

import pytest
import torch

needs_ranks = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
needs_deepspeed = pytest.mark.skipif(
    find_spec("deepspeed") is None or shutil.which("c++") is None,
    reason="needs DeepSpeed, pip install -e '.[deepspeed]', and a C++ compiler",
)
