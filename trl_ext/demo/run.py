"""The steps of the demo. Each leaves its result in the output folder, where a second run finds it."""

import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from transformers.trainer_utils import get_last_checkpoint

from rope_patch import describe, load_adapter, patch_model, unpatch_model
from rope_patch.environment import device_name, installed_versions
from rope_patch.eval import LossByPosition, in_distribution_penalty, loss_by_position
from rope_patch.eval.figures import require_matplotlib, save_figure
from rope_patch.eval.report import require_writable
from rope_patch.methods import resolve_rescaling, resolve_view

from ..config import RopeSFTConfig
from ..run_folder import Stopwatch
from ..trainer import RopeSFTTrainer
from . import corpus, model
from .reload_check import logits_after_reload
from .settings import DemoSettings


@contextmanager
def _without_warnings_of_others() -> Iterator[None]:
    """Leave out what packages say of each other's coming changes, which whoever runs a demo cannot act on."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"(?!rope_patch|rope_kernels|trl_ext)")
        yield


@_without_warnings_of_others()
def run(settings: DemoSettings, folder: Path) -> dict[str, Any]:
    """Do the whole job in `folder` and return its figures, which are also in `folder/demo.json`."""
    settings.check(folder)
    require_matplotlib()
    require_writable(folder)
    seconds = Stopwatch(folder / "seconds.json")
    with seconds("load"):
        base = settings.model or folder / "base"
        if settings.model is None:
            model.unpack_embedded(folder / "base")
        loaded, tokenizer = model.load(base, settings.device), model.load_tokenizer(base)
        window = _checked_window(settings, loaded)
        texts = corpus.build(
            tokenizer,
            measure_length=settings.measure_length,
            measure_rows=settings.measure_rows,
            train_length=settings.train_length,
            train_rows=settings.steps * settings.batch_size,
            seed=settings.seed,
        )
    settings.claim(folder)  # only now: a model that does not exist takes no folder
    arms = ["control", "after"] if settings.control else ["after"]
    _say(settings, window, loaded, _done(folder, ["before", *arms]))

    def fresh() -> PreTrainedModel:
        return model.load(base, settings.device)

    def measured(name: str, make: Callable[[], torch.nn.Module]) -> LossByPosition:
        file = folder / f"{name}.safetensors"
        if not file.is_file():
            subject = make()
            with seconds(f"measure {name}"):
                curve = loss_by_position(subject, texts.held_out, title=f"measuring {name}")
            save_file({"loss": curve.loss}, file)
        return LossByPosition(load_file(file)["loss"], settings.measure_rows, window)

    curves = {"before": measured("before", lambda: loaded)}
    for arm in arms:
        adapter = folder / ("adapter" if arm == "after" else "control-adapter")
        if not (adapter / "adapter_config.json").is_file():
            with seconds(f"train {arm}"):
                _train(settings, arm, fresh(), tokenizer, texts.train, folder / f"train-{arm}", adapter)
        curves[arm] = measured(arm, lambda adapter=adapter: load_adapter(fresh(), adapter))  # type: ignore[misc]

    with seconds("save and reload"):
        difference = _save_and_reload(fresh(), folder, tokenizer, texts.held_out[:1, :512])
    labels = {
        "before": "before",
        "control": f"control: plain fine-tuning, {_count(settings.train_tokens)} tokens",
        "after": f"after: {_method(settings)}, {_count(settings.train_tokens)} tokens",
    }
    figure = LossByPosition.figure({labels[name]: curves[name] for name in ("before", *arms)})
    figure.suptitle(_name(settings))
    pictures = save_figure(figure, folder / "loss_by_position")
    figures = _figures(settings, window, curves, seconds.times, difference, texts.held_out_files)
    (folder / "demo.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    _conclude(figures, folder, [*pictures, folder / "demo.json"])
    return figures


def _train(
    settings: DemoSettings,
    arm: str,
    base: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: torch.Tensor,
    checkpoints: Path,
    adapter: Path,
) -> None:
    """LoRA fine-tuning under the view, or under none for the control; goes on from the last checkpoint."""
    ids = rows.tolist()
    trainer = RopeSFTTrainer(
        base,
        RopeSFTConfig(
            output_dir=str(checkpoints),
            view=settings.view if arm == "after" else "standard",
            view_args=settings.view_args if arm == "after" else {},
            rescale=settings.rescale,
            rescale_args=settings.rescale_args,
            max_steps=settings.steps,
            per_device_train_batch_size=settings.batch_size,
            learning_rate=settings.learning_rate,
            lr_scheduler_type="cosine_with_min_lr",
            lr_scheduler_kwargs={"min_lr_rate": 0.1},
            warmup_steps=max(settings.steps // 10, 1),
            logging_steps=max(settings.steps // 20, 1),
            save_steps=max(settings.steps // 4, 1),
            save_total_limit=1,
            use_cpu=settings.device == "cpu",
            bf16=settings.device != "cpu",
            gradient_checkpointing=False,
            dataset_kwargs={"skip_prepare_dataset": True},
            report_to=[],
            seed=settings.seed,
        ),
        train_dataset=Dataset.from_dict({"input_ids": ids, "labels": ids}),
        processing_class=tokenizer,
        peft_config=LoraConfig(
            r=settings.lora_rank,
            lora_alpha=2 * settings.lora_rank,
            target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
            task_type="CAUSAL_LM",
        ),
    )
    for printing in (ProgressCallback, PrinterCallback):  # they print every log as a dictionary
        trainer.remove_callback(printing)
    trainer.add_callback(_LossBar())
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(checkpoints)) if checkpoints.is_dir() else None)
    trainer.save_model(str(adapter))


class _LossBar(ProgressCallback):
    """A bar over optimizer steps with the last loss in it."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        bar: Any = self.training_bar
        if bar is not None and logs and "loss" in logs:
            bar.set_postfix_str(f"loss {float(logs['loss']):.3f}")


def _checked_window(settings: DemoSettings, loaded: PreTrainedModel) -> int:
    """Positions that the model was trained on, once everything that could stop the run after them is tried.

    Raises:
        ValueError: the config names no window, the measured rows end within it, or rescaling or view do not fit.
    """
    window = describe(loaded).trained_window
    if window is None:
        raise ValueError(f"the config of {_name(settings)} names no window, so nothing can be measured beyond it.")
    if settings.measure_length < window + 2:
        raise ValueError(
            f"--measure-length must reach beyond the {window} positions that the model was trained on, got "
            f"{settings.measure_length}: what the demo shows is there."
        )
    view = resolve_view(settings.view, settings.view_args)
    if view.cuts is None:  # else it takes its part of a longer row
        view.check_length(settings.train_length)
    try:
        if settings.rescale is not None:
            patch_model(loaded, resolve_rescaling(settings.rescale, settings.rescale_args))
        patch_model(loaded, view)
    finally:
        unpatch_model(loaded)
    return window


def _done(folder: Path, curves: list[str]) -> list[str]:
    """What an earlier run of the same command has left in `folder`."""
    trained = {"after": "adapter", "control": "control-adapter"}
    done = []
    for name in curves:
        if name in trained and (folder / trained[name] / "adapter_config.json").is_file():
            done.append(f"training {name}")
        if (folder / f"{name}.safetensors").is_file():
            done.append(f"measuring {name}")
    return done


def _save_and_reload(
    base: PreTrainedModel, folder: Path, tokenizer: PreTrainedTokenizerBase, ids: torch.Tensor
) -> float:
    """Merge the adapter, save a plain checkpoint, and compare its logits in a new process with those here.

    Returns:
        The largest difference of a logit.

    Raises:
        RuntimeError: the reloaded model is another one.
    """
    peft_model: PeftModel = load_adapter(base, folder / "adapter")
    merged: Any = peft_model.merge_and_unload()
    merged.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    with torch.no_grad():
        here = merged.eval()(ids.to(base.device)).logits.cpu()
    there = logits_after_reload(folder / "model", ids, base.device.type, here.dtype)
    difference = (here.float() - there.float()).abs().max().item()
    # equal up to the order of sums in a matrix product, which a library may choose anew in each process
    if difference > 1e-2 * here.float().abs().max().item():
        raise RuntimeError(f"the model in {folder / 'model'} reloads to other logits: they differ by {difference}.")
    return difference


def _figures(
    settings: DemoSettings,
    window: int,
    curves: dict[str, LossByPosition],
    seconds: dict[str, float],
    reload_difference: float,
    held_out_files: tuple[str, ...],
) -> dict[str, Any]:
    edges = [64, *range(2048, settings.measure_length, 2048), settings.measure_length]
    return {
        "model": _name(settings),
        "window": window,
        "settings": asdict(settings),
        "train_tokens": settings.train_tokens,
        "held_out_files": list(held_out_files),
        "results": {
            name: {
                "loss_in_window": curve.in_window(window),
                "cliff": curve.cliff(window),
                "in_distribution_penalty_percent": in_distribution_penalty(curve, curves["before"], window),
                "loss_by_position": curve.bins(edges),
            }
            for name, curve in curves.items()
        },
        "in_distribution_penalty_against_control_percent": (
            in_distribution_penalty(curves["after"], curves["control"], window) if "control" in curves else None
        ),
        "largest_logit_difference_after_reload": reload_difference,
        "seconds": seconds,
        "device": device_name(settings.device != "cpu"),
        "versions": installed_versions("torch", "transformers", "trl", "peft"),
    }


def _name(settings: DemoSettings) -> str:
    return settings.model or "SmolLM2-135M-Instruct"


def _method(settings: DemoSettings) -> str:
    return f"{settings.rescale} + {settings.view}" if settings.rescale else settings.view


def _count(tokens: int) -> str:
    return f"{tokens / 1e6:.1f}M" if tokens >= 1e6 else f"{tokens / 1e3:.0f}K"


def _say(settings: DemoSettings, window: int, loaded: PreTrainedModel, done: list[str]) -> None:
    print(describe(loaded))
    print(
        f"Measuring: {settings.measure_rows} held-out row(s) of {settings.measure_length} tokens; the model was "
        f"trained on {window}.\nTraining: {_method(settings)} {settings.view_args or ''} on rows of "
        f"{settings.train_length} tokens, {settings.train_tokens} tokens in all"
        + (", and a control without the view." if settings.control else ".")
    )
    if settings.device == "cpu":
        print(
            "No GPU: training rows are short and few, so that this takes minutes. On a GPU, training rows are 8 times "
            "as long, the measured ones reach 32768 tokens, and training sees 80 times the tokens."
        )
    if done:
        print(f"Done by an earlier run, and not done again: {', '.join(done)}.")


def _conclude(figures: dict[str, Any], folder: Path, files: list[Path]) -> None:
    print(f"\n{'':10}{'loss 64..' + str(figures['window']):>16}{'beyond':>10}{'cliff':>10}")
    for name, result in figures["results"].items():
        inside, cliff = result["loss_in_window"], result["cliff"]
        print(f"{name:10}{inside:16.3f}{inside + cliff:10.3f}{cliff:10.3f}")
    print("\nThe cliff is how much worse, in nats per token, the model predicts beyond its window than within it.")
    print(
        f"Reloaded in a new process without this package: logits differ by "
        f"{figures['largest_logit_difference_after_reload']:.2g} at most."
    )
    print(f"Model:   {folder / 'model'}  (plain checkpoint; the adapter alone is in {folder / 'adapter'})")
    for file in files:
        print(f"Figures: {file}")
