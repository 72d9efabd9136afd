"""Weights that FSDP would copy wrong are refused."""

from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType

from trl_ext.engines.weights import require_unharmed_codes


def test_codes_that_a_gpu_would_copy_wrong_are_refused(monkeypatch):
    class Params4bit(torch.nn.Parameter):
        pass

    def copy_as_gpus_do(copies, given):
        for copy, each in zip(copies, given, strict=True):
            copy.copy_(torch.where(each.isnan(), float("nan"), each))

    policy = SimpleNamespace(param_dtype=torch.bfloat16)
    plugin = SimpleNamespace(mixed_precision_policy=policy)
    accelerator = SimpleNamespace(
        distributed_type=DistributedType.FSDP, device=torch.device("cpu"), state=SimpleNamespace(fsdp_plugin=plugin)
    )
    model = torch.nn.Module()
    model.weight = Params4bit(torch.zeros(4, dtype=torch.bfloat16), requires_grad=False)
    require_unharmed_codes(model, accelerator)
    monkeypatch.setattr(torch, "_foreach_copy_", copy_as_gpus_do)
    with pytest.raises(ValueError, match="issue 159333.* lie in bfloat16: leave bnb_4bit_quant_storage out"):
        require_unharmed_codes(model, accelerator)
