"""What an engine splits over ranks: by the names of configs, and by what accelerate was told."""

from argparse import Namespace

import pytest
import torch
from accelerate import ParallelismConfig
from accelerate.utils import DistributedType
from support.tiny import tiny
from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, OffloadPolicy, ShardingStrategy

from trl_ext import RopeSFTConfig
from trl_ext.engines.sharding import Sharding
from trl_ext.memory import plan as memory_plan
from trl_ext.memory.plan import plan_memory
from trl_ext.recipes.launching import config_names


def deepspeed(stage, **zero):
    plugin = Namespace(zero_stage=stage, deepspeed_config={"zero_optimization": zero})
    return {"distributed_type": DistributedType.DEEPSPEED, "state": Namespace(deepspeed_plugin=plugin)}


def fsdp(reshard=True, offload=None):
    plugin = Namespace(reshard_after_forward=reshard, cpu_offload=offload or OffloadPolicy())
    return {"distributed_type": DistributedType.FSDP, "state": Namespace(fsdp_plugin=plugin)}


def of(parallelism=None, n=8, state=None, **options):
    return Sharding.of(
        Namespace(num_processes=n, parallelism_config=parallelism, state=state or Namespace(), **options)
    )


def split(sharding):
    return sharding.weights, sharding.gradients, sharding.optimizer, sharding.teacher, sharding.row


def test_names_of_configs():
    assert {name: split(Sharding.of_config(name, 4)) for name in config_names()} == {
        "ddp": (1, 1, 1, 1, 1),
        "zero2": (1, 4, 4, 1, 1),
        "zero3": (4, 4, 4, 1, 1),
        "zero3-sp": (4, 4, 4, 1, 4),
        "fsdp2": (4, 4, 4, 4, 1),
        "fsdp2-cp": (4, 4, 4, 4, 4),
    }
    assert [name for name in config_names() if Sharding.of_config(name, 4).ring] == ["fsdp2-cp"]


@pytest.mark.parametrize(
    ("engine", "parallelism", "expected"),
    [
        ({"distributed_type": DistributedType.NO}, None, (1, 1, 1, 1, 1)),
        ({"distributed_type": DistributedType.MULTI_GPU}, None, (1, 1, 1, 1, 1)),
        (deepspeed(0), None, (1, 1, 1, 1, 1)),
        (deepspeed(1), None, (1, 1, 8, 1, 1)),
        (deepspeed(2), None, (1, 8, 8, 1, 1)),
        (deepspeed(3), None, (8, 8, 8, 1, 1)),
        (fsdp(), None, (8, 8, 8, 8, 1)),
        (fsdp(reshard=False), None, (1, 8, 8, 8, 1)),
        (fsdp(reshard=ShardingStrategy.FULL_SHARD), None, (8, 8, 8, 8, 1)),
        (fsdp(reshard=ShardingStrategy.SHARD_GRAD_OP), None, (1, 8, 8, 8, 1)),
        (fsdp(reshard=ShardingStrategy.NO_SHARD), None, (1, 1, 1, 1, 1)),
        # two copies of four ranks each; four ranks a row, two rows at a time
        (fsdp(), {"dp_replicate_size": 2, "dp_shard_size": 4}, (4, 4, 4, 4, 1)),
        (fsdp(), {"dp_shard_size": 2, "cp_size": 4}, (8, 8, 8, 8, 4)),
    ],
)
def test_what_accelerate_was_told(engine, parallelism, expected):
    sharding = of(None if parallelism is None else ParallelismConfig(**parallelism), **engine)
    assert split(sharding) == expected
    assert sharding.ring == (sharding.row > 1) and sharding.keeps_weights and sharding.keeps_states


def test_what_waits_on_the_host_does_not_count():
    assert not of(**fsdp(offload=CPUOffloadPolicy())).keeps_weights
    assert not of(**fsdp(offload=CPUOffload(offload_params=True))).keeps_weights
    assert of(**fsdp(offload=CPUOffload(offload_params=False))).keeps_weights
    states = of(**deepspeed(3, offload_optimizer={"device": "cpu"}, offload_param={"device": "none"}))
    assert states.keeps_weights and not states.keeps_states

    def fixed(sharding):
        args = RopeSFTConfig(output_dir="out", use_cpu=True, bf16=False)
        return plan_memory(tiny(), args, 64, torch.device("cpu"), "on", sharding).memory.fixed

    total = 4 * sum(p.numel() for p in tiny().parameters())
    # of the kept ones an eighth, and all weights at once, fewer as they are than ZeRO-3 leaves whole
    assert fixed(states) - states.buffers == pytest.approx(total / 8 + total, rel=1e-3)
    assert fixed(of(**fsdp(offload=CPUOffloadPolicy()))) < total


def test_weights_that_zero3_has_split_count_whole(monkeypatch):
    # what is free on this machine changes between two plans
    monkeypatch.setattr(memory_plan, "host_memory", lambda: 100 << 30)
    monkeypatch.setattr(memory_plan, "device_memory", lambda device: 60 << 30)
    args = RopeSFTConfig(output_dir="out", use_cpu=True, bf16=False)
    model = tiny()
    whole = plan_memory(model, args, 64, torch.device("cpu"), "on", Sharding.of_config("zero3", 4))
    for parameter in model.parameters():  # as zero.Init leaves them
        parameter.ds_numel, parameter.ds_shape = parameter.numel(), parameter.shape
        parameter.data = torch.empty(0)
    assert plan_memory(model, args, 64, torch.device("cpu"), "on", Sharding.of_config("zero3", 4)) == whole


def fixed(model, sharding, **options):
    args = RopeSFTConfig(output_dir="out", **{"use_cpu": True, "bf16": True, **options})
    return plan_memory(model, args, 64, torch.device("cpu"), "on", sharding).memory.fixed


def test_engines_that_split_states_train_float32_numbers():
    """accelerate makes trained weights of 16 bits float32 for FSDP2, and DeepSpeed keeps such a copy."""
    half, single = tiny(dtype=torch.bfloat16), tiny()
    sharding = Sharding.of_config("fsdp2", 2)
    assert fixed(half, sharding) == pytest.approx(fixed(single, sharding), rel=0.01)
    one = Sharding()
    assert fixed(half, one) == pytest.approx(fixed(single, one) * 8 / 18, rel=0.1)
    for parameter in half.parameters():  # what is not trained stays in 16 bits
        parameter.requires_grad_(False)
    assert fixed(half, sharding) < 0.3 * fixed(single, sharding)


def test_codes_in_integers_stay_whole_on_each_rank():
    model = tiny(dtype=torch.bfloat16).requires_grad_(False)
    plain = fixed(model, Sharding.of_config("fsdp2", 8))
    codes = 10**6
    model.lm_head.codes = torch.nn.Parameter(torch.zeros(codes, dtype=torch.uint8), requires_grad=False)
    assert fixed(model, Sharding.of_config("fsdp2", 8)) == plain + codes


def test_nothing_runs_in_tiles_under_zero3():
    def plan(name):
        args = RopeSFTConfig(output_dir="out", use_cpu=True, bf16=False)
        return plan_memory(tiny(), args, 8192, torch.device("cpu"), "on", Sharding.of_config(name, 2))

    tiled, whole = plan("fsdp2"), plan("zero3")
    assert whole.memory_when_on.layer > tiled.memory_when_on.layer and whole.memory.layer == tiled.memory.layer
    assert "with tiles of 4096 tokens and the checkpoints of" in str(tiled)
    assert "with the checkpoints of" in str(whole) and "tiles" not in str(whole)
