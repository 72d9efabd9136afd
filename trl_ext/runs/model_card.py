"""The facts of a run for its record, and the card of the model that a trainer saves."""

import math
import os
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from transformers.integrations import is_wandb_available
from trl.trainer import utils as trl_utils

from rope_patch.adapters.watch import adapter_configs, base_revision
from rope_patch.base import papers
from rope_patch.base.environment import installed_versions
from rope_patch.export.serving import serving_of
from rope_patch.forward.config_checks import text_config
from rope_patch.forward.sources import ViewSource
from rope_patch.forward.state import state_of
from rope_patch.loading import adapter_folder_of
from rope_patch.model_card import BaseModel, facts_of, native_window, read_runs, render
from rope_patch.rope.rotary import find_causal_lm, find_decoder

from .same_rows import data_facts

if TYPE_CHECKING:
    from ..config import RopeSFTConfig

_HUB = "hf://datasets/"
# names of readers of files, which say nothing of the data in them
_READERS = ("json", "parquet", "csv", "text", "arrow", "generator", "list", "dict", "pandas", "default", "webdataset")
_TRAINED = {"all": "every weight", "qkv": "the projections to queries, keys and values"}


@dataclass(frozen=True)
class SavedRun:
    """A run at the moment its model is saved.

    Args:
        model: as it is trained.
        args: of the trainer.
        train_dataset: as TRL has prepared it.
        processing_class: tokenizer or processor, None without one.
        lr_scheduler: None before training.
        steps: optimizer steps so far.
        tokens: trained on so far.
        base_revision: of the base model on the hub, None if it is not known.
        hub_model: name, revision and commit of a base model on the hub.
        hub_model_id: under which the result is pushed, None if it is not.
        tags: that every card of this trainer has.
    """

    model: Any
    args: "RopeSFTConfig"
    train_dataset: Any
    processing_class: Any
    lr_scheduler: Any
    steps: int
    tokens: int
    base_revision: str | None
    hub_model: dict[str, Any] | None
    hub_model_id: str | None
    tags: Sequence[str]


@dataclass(frozen=True)
class DatasetFacts:
    """Name and size of a training set before it is prepared.

    Args:
        name: its id on the hub, or the name that it was made with; "" if it has none.
        documents: how many it has; None for a stream and for rows of tokens, whose documents are not known.
    """

    name: str = ""
    documents: int | None = None

    @classmethod
    def of(cls, dataset: Any) -> Self:
        """Read them from a `datasets.Dataset`, or anything else that a trainer takes."""
        info = getattr(dataset, "info", None)
        files = list(getattr(info, "download_checksums", None) or {})
        # hf://datasets/OWNER/NAME@COMMIT/FILE
        on_hub = [file.removeprefix(_HUB).partition("@")[0] for file in files if file.startswith(_HUB)]
        named = getattr(info, "dataset_name", None) or ""
        name = on_hub[0] if on_hub else "" if named in _READERS else named
        is_cut = "input_ids" in (getattr(dataset, "column_names", None) or ())  # rows may be parts of texts
        return cls(name, len(dataset) if isinstance(dataset, Sized) and not is_cut else None)

    def named(self, name: str | None) -> Self:
        """A copy with the name that a user gives."""
        return self if name is None else replace(self, name=name)


def runs_before(name_or_path: str, output_dir: str | None) -> list[dict[str, Any]]:
    """Records of the runs that made a base model; the last one of a checkpoint in `output_dir` is this run."""
    runs = read_runs(name_or_path)
    resumes = output_dir is not None and Path(output_dir).resolve() in Path(name_or_path).resolve().parents
    return runs[:-1] if resumes else runs


def run_facts(
    run: SavedRun,
    source: ViewSource | None,
    dataset: DatasetFacts,
    earlier: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """The facts of a run that are known, as JSON values.

    Args:
        run: as it is saved.
        source: of its view, None for a model without RoPE.
        dataset: as the user gave it.
        earlier: records of the runs that made the base model.
    """
    args, model = run.args, run.model
    revision = run.base_revision or base_revision(model)
    base = BaseModel.of(find_causal_lm(model).config._name_or_path, revision)
    before = earlier[-1].get("run", {}).get("rescalings", []) if earlier else []
    state = None if source is None else state_of(find_decoder(model))
    rescalings = () if state is None else state.rescalings
    if state is not None and before and adapter_folder_of(model) is not None:
        rescalings = rescalings[len(state.start_rescalings) :]  # the adapter brought those of the runs before
    cited = [paper for rescaling in rescalings for paper in rescaling.cites]
    cited += [] if source is None else source.view.cited()
    cited += args.objective_options.cited()
    cited += [papers.LONGLORA] if args.shifted_attention is not None else []
    cited.append(papers.TRL)
    known = {
        "base_model": None if base is None else base.to_dict(),
        "hub_model": run.hub_model,
        "native_window": None if source is None else native_window(model, earlier),
        "rescalings": [
            *before,
            *({"method": rescaling.name, "options": rescaling.options()} for rescaling in rescalings),
        ],
        "trained": _trained(model, args.trainable),
        "dataset": dataset.name or None,
        "documents": dataset.documents,
        "rows": len(run.train_dataset) if isinstance(run.train_dataset, Sized) else None,
        **data_facts(run.train_dataset, args),
        "row_length": args.max_length,
        "tokens": run.tokens,
        "steps": run.steps,
        "learning_rate": _learning_rate(run),
        "papers": list(dict.fromkeys(cited)),
        "versions": installed_versions("torch", "transformers", "trl", "peft"),
    }
    return {name: value for name, value in known.items() if value is not None}  # 0 and [] are facts


def card_of(
    run: SavedRun,
    runs: Sequence[Mapping[str, Any]],
    *,
    title: str | None = None,
    tags: str | list[str] | None = None,
) -> str:
    """The card of a model that is saved.

    Args:
        run: the last one.
        runs: the records of all of them.
        title: None takes the id on the hub, or the name of the output folder.
        tags: besides those of TRL and of this package.
    """
    model, tokenizer = run.model, run.processing_class
    causal_lm = find_causal_lm(model)
    facts = facts_of(model, runs, is_adapter=causal_lm is not model, rescalings=runs[-1]["run"]["rescalings"])
    name = title or run.hub_model_id or Path(str(run.args.output_dir)).resolve().name
    serving = None
    if facts.context and not facts.always_view and not facts.has_own_code:  # which `export` refuses
        config = text_config(causal_lm, find_decoder(model))
        serving = serving_of(config, getattr(config, "max_position_embeddings", None), None)
    extra_tags = [tags] if isinstance(tags, str) else tags or []
    facts = replace(
        facts,
        serving=serving,
        tags=tuple(dict.fromkeys([*facts.tags, "generated_from_trainer", *_trl_tags(run), *extra_tags])),
        links=_links(),
        has_tokenizer=tokenizer is not None,
        has_chat_template=getattr(tokenizer, "chat_template", None) is not None,
    )
    return render(facts, name.split("/")[-1])


def _learning_rate(run: SavedRun) -> str:
    """Peak and schedule; if training ended within the warm-up, the highest rate that was reached."""
    peak = run.args.learning_rate
    schedule = getattr(run.args.lr_scheduler_type, "value", run.args.lr_scheduler_type)
    # the factor on the rate by step, which schedules of Transformers have and those of DeepSpeed do not
    factors = getattr(run.lr_scheduler, "lr_lambdas", None)
    highest = max(map(factors[0], range(run.steps))) if factors and run.steps else 1.0
    if highest < 1 and not math.isclose(highest, 1):
        return f"at most {highest * peak:.3g}, {schedule}: the steps ended before the peak of {peak:g}"
    return f"{peak:g}, {schedule}"


def _trained(model: Any, trainable: str) -> str:
    configs = adapter_configs(model)
    if not configs:
        return _TRAINED[trainable]
    adapters = []
    for config in configs.values():
        kind = {"LORA": "LoRA"}.get(config.peft_type.value, config.peft_type.value)
        rank, targets = getattr(config, "r", None), getattr(config, "target_modules", None)
        on = targets if isinstance(targets, str) else ", ".join(sorted(targets or ()))
        adapters.append(f"adapters, {kind}{f' of rank {rank}' if rank else ''}{f' on {on}' if on else ''}")
    return "; ".join(adapters)


def _trl_tags(run: SavedRun) -> list[str]:
    """The tags of TRL's own card."""
    jobs = ["hf_jobs"] if "JOB_ID" in os.environ else []
    unsloth = ["unsloth"] if hasattr(run.model.config, "unsloth_version") else []
    tracked = trl_utils.get_trackio_space_url()
    return [*run.tags, *jobs, *unsloth, *([f"trackio:{tracked}"] if tracked else [])]


def _links() -> tuple[tuple[str, str], ...]:
    """Where the run is logged."""
    addresses = {"Trackio": trl_utils.get_trackio_space_url(), "Comet": trl_utils.get_comet_experiment_url()}
    if is_wandb_available():
        import wandb

        addresses["Weights & Biases"] = None if wandb.run is None else wandb.run.url
    return tuple((name, address) for name, address in addresses.items() if address)
