"""One process trains on one GPU, however many are visible."""

from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType
from support.training import trainer
from transformers import TrainingArguments

from trl_ext import RopeSFTConfig
from trl_ext.trainer.gpus import loading_on_one_gpu, tell_idle_gpus


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


def args(device="cuda", distributed=DistributedType.NO, **fields):
    state = SimpleNamespace(distributed_type=distributed)
    return SimpleNamespace(device=torch.device(device), distributed_state=state, model_init_kwargs=None, **fields)


def test_a_view_trains_where_trainer_would_copy_the_model_to_each_gpu(tmp_path, two_gpus):
    assert TrainingArguments(output_dir=str(tmp_path)).n_gpu == 2
    one = trainer(tmp_path, view="skip", use_cpu=False, bf16=False)
    assert one.args.n_gpu == 1 and one.args.train_batch_size == one.args.per_device_train_batch_size
    one.train()
    assert one.model_wrapped is one.model and one.state.global_step > 0


def test_a_model_given_by_name_is_loaded_on_one(two_gpus):
    of = args("cuda:1")
    with pytest.raises(KeyError), loading_on_one_gpu(of):
        assert of.model_init_kwargs == {"device_map": {"": 1}}
        raise KeyError
    assert of.model_init_kwargs is None
    asked = args()
    asked.model_init_kwargs = {"device_map": "auto", "dtype": "bfloat16"}
    with loading_on_one_gpu(asked):
        assert asked.model_init_kwargs == {"device_map": "auto", "dtype": "bfloat16"}
    for elsewhere in (args("cpu"), args(distributed=DistributedType.MULTI_GPU)):
        with loading_on_one_gpu(elsewhere):
            assert elsewhere.model_init_kwargs is None


def test_idle_gpus_are_told(two_gpus, monkeypatch):
    told = []
    monkeypatch.setattr("trl_ext.trainer.gpus.logger", SimpleNamespace(warning=told.append))
    tell_idle_gpus(args("cuda:0"))
    tell_idle_gpus(args("cpu"))
    assert len(told) == 1 and "2 GPUs are visible, and one process trains on one, cuda:0" in told[0]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    tell_idle_gpus(args("cuda:0"))
    assert len(told) == 1


def test_a_config_on_one_gpu_or_none_is_trainers(tmp_path, monkeypatch):
    for visible, expected in ((1, 1), (0, 0)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda n=visible: n)
        assert RopeSFTConfig(output_dir=str(tmp_path), bf16=False).n_gpu == expected
    assert RopeSFTConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False).n_gpu == 0
