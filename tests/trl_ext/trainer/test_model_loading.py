"""A model by name has all of its weights, and lies on the one GPU that a process trains on."""

from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType
from datasets import Dataset
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from support.characters import CHARACTERS, character_tokenizer
from support.tiny import tiny
from support.training import trainer
from transformers import TrainingArguments
from trl import SFTTrainer

from trl_ext import RopeSFTConfig, RopeSFTTrainer
from trl_ext.trainer import model_loading
from trl_ext.trainer.model_loading import loading_options, warn_of_idle_gpus

MODEL = "model.safetensors"


@pytest.fixture
def folder(tmp_path):
    tiny(vocab_size=CHARACTERS).save_pretrained(tmp_path / "tiny")
    character_tokenizer().save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def args(folder, **options):
    defaults = {"max_steps": 2, "max_length": 16, "use_cpu": True, "bf16": False, "report_to": [], "disable_tqdm": True}
    return RopeSFTConfig(output_dir=str(folder / "run"), **defaults | options)


def rows():
    return Dataset.from_dict({"text": ["one text", "and another"]})


def changed(folder, change):
    weights = load_file(folder / MODEL)
    change(weights)
    save_file(weights, folder / MODEL, metadata={"format": "pt"})


def missing(folder):
    changed(folder, lambda weights: weights.pop("model.norm.weight"))


def misshapen(folder):
    changed(folder, lambda weights: weights.update({"model.norm.weight": torch.ones(3)}))


def damaged(folder):
    (folder / MODEL).write_bytes((folder / MODEL).read_bytes()[:-7])


@pytest.mark.parametrize("peft", [False, True], ids=["weights", "lora"])
@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (missing, "tiny lack model.norm.weight of the LlamaForCausalLM"),
        (misshapen, "tiny have another shape for model.norm.weight of the LlamaForCausalLM"),
        (damaged, "tiny cannot be read"),
    ],
)
def test_weights_that_are_not_whole_are_refused(harm, message, peft, folder):
    harm(folder)
    config = args(folder, model_init_kwargs={"dtype": "float32"})
    lora = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM") if peft else None
    with pytest.raises(ValueError, match=message):
        RopeSFTTrainer(str(folder), config, train_dataset=rows(), peft_config=lora)
    assert config.model_init_kwargs == {"dtype": "float32"}, "as it was given"


@pytest.mark.parametrize(
    "given", [None, {"dtype": "bfloat16"}, {"dtype": torch.float32, "attn_implementation": "eager"}, {"dtype": "auto"}]
)
def test_whole_weights_are_loaded_as_by_trl(given, folder):
    config = args(folder, model_init_kwargs=given)
    ours = RopeSFTTrainer(str(folder), config, train_dataset=rows())
    plain = SFTTrainer(str(folder), args(folder, model_init_kwargs=given), train_dataset=rows())
    assert type(ours.model) is type(plain.model) and ours.model.dtype == plain.model.dtype
    assert ours.model.config._attn_implementation == plain.model.config._attn_implementation
    theirs = plain.model.state_dict()
    assert all(torch.equal(weight, theirs[name]) for name, weight in ours.model.state_dict().items())
    assert config.model_init_kwargs == given and ours.args.model_init_kwargs == given


def test_what_the_user_asks_transformers_for_is_left_to_it(folder, monkeypatch):
    misshapen(folder)
    asked = {"ignore_mismatched_sizes": True, "dtype": "float32"}
    run = RopeSFTTrainer(str(folder), args(folder, model_init_kwargs=asked), train_dataset=rows())
    assert run.model.model.norm.weight.shape != (3,)
    missing(folder)
    monkeypatch.setattr(model_loading, "is_deepspeed_zero3_enabled", lambda: True)
    RopeSFTTrainer(str(folder), args(folder), train_dataset=rows())


def test_too_little_memory_is_told_as_it_is(folder, monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(model_loading, "create_model_from_path", full)
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        RopeSFTTrainer(str(folder), args(folder), train_dataset=rows())


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


def on_device(device="cuda", distributed=DistributedType.NO, **fields):
    state = SimpleNamespace(distributed_type=distributed)
    return SimpleNamespace(device=torch.device(device), distributed_state=state, model_init_kwargs=None, **fields)


def test_a_view_trains_where_trainer_would_copy_the_model_to_each_gpu(tmp_path, two_gpus):
    assert TrainingArguments(output_dir=str(tmp_path)).n_gpu == 2
    one = trainer(tmp_path, view="skip", use_cpu=False, bf16=False)
    assert one.args.n_gpu == 1 and one.args.train_batch_size == one.args.per_device_train_batch_size
    one.train()
    assert one.model_wrapped is one.model and one.state.global_step > 0


def test_a_model_given_by_name_is_loaded_on_one(two_gpus):
    of = on_device("cuda:1")
    with pytest.raises(KeyError), loading_options(None, of):
        assert of.model_init_kwargs == {"device_map": {"": 1}}
        raise KeyError
    assert of.model_init_kwargs is None
    asked = on_device()
    asked.model_init_kwargs = {"device_map": "auto", "dtype": "bfloat16"}
    with loading_options(None, asked):
        assert asked.model_init_kwargs == {"device_map": "auto", "dtype": "bfloat16"}
    for elsewhere in (on_device("cpu"), on_device(distributed=DistributedType.MULTI_GPU)):
        with loading_options(None, elsewhere):
            assert elsewhere.model_init_kwargs is None


def test_idle_gpus_are_warned_of(two_gpus, monkeypatch):
    told = []
    monkeypatch.setattr("trl_ext.trainer.model_loading.logger", SimpleNamespace(warning=told.append))
    warn_of_idle_gpus(on_device("cuda:0"))
    warn_of_idle_gpus(on_device("cpu"))
    assert len(told) == 1 and "2 GPUs are visible, and one process trains on one, cuda:0" in told[0]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    warn_of_idle_gpus(on_device("cuda:0"))
    assert len(told) == 1


def test_a_config_on_one_gpu_or_none_is_trainers(tmp_path, monkeypatch):
    for visible, expected in ((1, 1), (0, 0)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda n=visible: n)
        assert RopeSFTConfig(output_dir=str(tmp_path), bf16=False).n_gpu == expected
    assert RopeSFTConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False).n_gpu == 0
