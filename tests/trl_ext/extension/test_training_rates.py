"""The learning rate of each step of a training, as the optimizer has it when it steps."""

import pytest
import torch
from datasets import Dataset
from support.tiny import tiny
from support.training import tokenizer
from transformers import TrainerCallback, get_scheduler

from trl_ext import RopeSFTConfig, RopeSFTTrainer
from trl_ext.extension.choices import Choice, Choices
from trl_ext.extension.options import ExtendOptions
from trl_ext.extension.training import training_fields

PEAK = 1e-3


class Rates(list, TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, optimizer, **_):
        self.append(optimizer.param_groups[0]["lr"])


def choices():
    values = {
        "rescaling": {"rescale": "ntk", "rescale_args": {"factor": 2.0}},
        "view": {"view": "standard"},
        "objective": {"objective": "clm"},
        "rows": {"length": 8},
        "weights": {"train": "all", "lora_rank": 4, "gradient_checkpointing": False},
        "rate": PEAK,
        "precision": "float32",
        "evaluation": None,
    }
    return Choices(**{name: Choice("", value, "", "", "your choice", "") for name, value in values.items()})


def fields(n_steps):
    options = ExtendOptions(model="tiny", to=1, data=("none",), output="", rows_per_step=1, device="cpu")
    return {**training_fields(choices(), options, n_steps), "save_strategy": "no", "disable_tqdm": True}


def planned(n_steps, args):
    """The rates of the schedule, as Transformers makes it of the config."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=args.learning_rate)
    kwargs = {"scheduler_specific_kwargs": args.lr_scheduler_kwargs}
    schedule = get_scheduler(args.lr_scheduler_type, optimizer, args.get_warmup_steps(n_steps), n_steps, **kwargs)
    rates = []
    for _ in range(n_steps):
        rates += schedule.get_last_lr()
        optimizer.step()
        schedule.step()
    return rates


@pytest.mark.parametrize("n_steps", [1, 2, 20, 200])
def test_every_step_trains_and_the_peak_is_reached(n_steps, tmp_path):
    rates = planned(n_steps, RopeSFTConfig(output_dir=str(tmp_path), **fields(n_steps)))
    assert min(rates) == pytest.approx(PEAK if n_steps == 1 else 0.1 * PEAK)
    warm_up = rates.index(PEAK) + 1
    assert warm_up == -(-n_steps // 20), "a twentieth of the steps"
    assert rates[:warm_up] == pytest.approx([PEAK * k / warm_up for k in range(1, warm_up + 1)])
    assert rates[warm_up - 1 :] == sorted(rates[warm_up - 1 :], reverse=True)


def test_the_optimizer_has_the_rates_of_the_schedule(tmp_path):
    rates, args = Rates(), RopeSFTConfig(output_dir=str(tmp_path), **fields(3))
    RopeSFTTrainer(
        tiny(num_hidden_layers=1),
        args,
        train_dataset=Dataset.from_dict({"input_ids": [[5, 6, 7, 8]] * 3}),
        processing_class=tokenizer(),
        callbacks=[rates],
    ).train()
    assert rates == planned(3, args)
