"""What a trainer knows of its run for the model card, and the card of the model that it saves."""

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
    from ..trainer.trainer import RopeSFTTrainer

_HUB = "hf://datasets/"
# names of readers of files, which say nothing of the data in them
_READERS = ("json", "parquet", "csv", "text", "arrow", "generator", "list", "dict", "pandas", "default", "webdataset")
_TRAINED = {"all": "every weight", "qkv": "the projections to queries, keys and values"}


@dataclass(frozen=True)
class DatasetFacts:
    """What a training set says of itself before it is prepared.

    Args:
        name: its id on the hub, or the name that it was made with; "" where it says none.
        documents: how many it has; None where that is not known: of a stream, and of rows of tokens, of which a
            document may have given several.
    """

    name: str = ""
    documents: int | None = None

    @classmethod
    def of(cls, dataset: Any) -> Self:
        """Read them off a `datasets.Dataset` or what else a trainer takes."""
        info = getattr(dataset, "info", None)
        files = list(getattr(info, "download_checksums", None) or {})
        on_hub = [file.removeprefix(_HUB).partition("@")[0] for file in files if file.startswith(_HUB)]
        named = getattr(info, "dataset_name", None) or ""
        name = on_hub[0] if on_hub else "" if named in _READERS else named
        is_cut = "input_ids" in (getattr(dataset, "column_names", None) or ())
        return cls(name, len(dataset) if isinstance(dataset, Sized) and not is_cut else None)

    def named(self, name: str | None) -> Self:
        """The same with the name that a user gives."""
        return self if name is None else replace(self, name=name)


def runs_before(name_or_path: str, output_dir: str | None) -> list[dict[str, Any]]:
    """The runs that made the model which a run begins with; of one of its own checkpoints, those before it."""
    runs = read_runs(name_or_path)
    own = runs and output_dir is not None and Path(output_dir).resolve() in Path(name_or_path).resolve().parents
    return runs[:-1] if own else runs


def run_facts(
    trainer: "RopeSFTTrainer",
    source: ViewSource | None,
    dataset: DatasetFacts,
    earlier: Sequence[Mapping[str, Any]],
    tokens: int,
) -> dict[str, Any]:
    """What a run has trained, on what and how long, as JSON values; without what is not known.

    Args:
        trainer: of the run.
        source: of its view, None for a model without RoPE.
        dataset: as it came.
        earlier: runs that made the model it began with.
        tokens: that it has seen.
    """
    args, model = trainer.args, trainer.model
    revision = trainer.base_revision or base_revision(model)
    base = BaseModel.of(find_causal_lm(model).config._name_or_path, revision)
    before = earlier[-1].get("run", {}).get("rescalings", []) if earlier else []
    state = None if source is None else state_of(find_decoder(model))
    rescalings = () if state is None else state.rescalings
    if state is not None and before and adapter_folder_of(model) is not None:
        rescalings = rescalings[len(state.start_rescalings) :]  # the adapter brought those of the runs before
    cited = [paper for one in rescalings for paper in one.cites]
    cited += [] if source is None else source.view.cited()
    cited += args.objective_options.cited()
    cited += [papers.LONGLORA] if args.shifted_attention is not None else []
    cited.append(papers.TRL)
    known = {
        "base_model": None if base is None else base.to_dict(),
        "hub_model": trainer.hub_model,
        "native_window": None if source is None else native_window(model, earlier),
        "rescalings": [*before, *({"method": one.name, "options": one.options()} for one in rescalings)],
        "trained": _trained(model, args.trainable),
        "dataset": dataset.name or None,
        "documents": dataset.documents,
        "rows": len(trainer.train_dataset) if isinstance(trainer.train_dataset, Sized) else None,
        **data_facts(trainer.train_dataset, args),
        "row_length": args.max_length,
        "tokens": tokens,
        "steps": trainer.state.global_step,
        "learning_rate": _learning_rate(trainer),
        "papers": list(dict.fromkeys(cited)),
        "versions": installed_versions("torch", "transformers", "trl", "peft"),
    }
    return {name: value for name, value in known.items() if value is not None}


def card_of(
    trainer: "RopeSFTTrainer",
    runs: Sequence[Mapping[str, Any]],
    *,
    title: str | None = None,
    tags: str | list[str] | None = None,
) -> str:
    """The card of the model as it stands.

    Args:
        trainer: of the last run.
        runs: all of them.
        title: None takes the id on the hub, or the name of the output folder.
        tags: beside those of TRL and of this package.
    """
    model, tokenizer = trainer.model, trainer.processing_class
    causal_lm = find_causal_lm(model)
    facts = facts_of(model, runs, is_adapter=causal_lm is not model, rescalings=runs[-1]["run"]["rescalings"])
    name = title or trainer.hub_model_id or Path(str(trainer.args.output_dir)).resolve().name
    serving = None
    if facts.context and not facts.always_view and not facts.has_own_code:  # which `export` refuses
        config = text_config(causal_lm, find_decoder(model))
        serving = serving_of(config, getattr(config, "max_position_embeddings", None), None)
    given = [tags] if isinstance(tags, str) else tags or []
    facts = replace(
        facts,
        serving=serving,
        tags=tuple(dict.fromkeys([*facts.tags, "generated_from_trainer", *_tags_of_trl(trainer), *given])),
        links=_links(),
        has_tokenizer=tokenizer is not None,
        has_chat_template=getattr(tokenizer, "chat_template", None) is not None,
    )
    return render(facts, name.split("/")[-1])


def _learning_rate(trainer: "RopeSFTTrainer") -> str:
    """Peak and schedule; where warm-up was longer than the steps so far, the highest rate that they had."""
    peak = trainer.args.learning_rate
    schedule = getattr(trainer.args.lr_scheduler_type, "value", trainer.args.lr_scheduler_type)
    steps = trainer.state.global_step
    # what a rate is multiplied by, from step to step: of the schedules of Transformers, and not of those of DeepSpeed
    factors = getattr(trainer.lr_scheduler, "lr_lambdas", None)
    highest = max(map(factors[0], range(steps))) if factors and steps else 1.0
    if highest < 1 and not math.isclose(highest, 1):
        return f"at most {highest * peak:.3g}, {schedule}: the steps ended before the peak of {peak:g}"
    return f"{peak:g}, {schedule}"


def _trained(model: Any, trainable: str) -> str:
    configs = adapter_configs(model)
    if not configs:
        return _TRAINED[trainable]
    told = []
    for config in configs.values():
        kind = {"LORA": "LoRA"}.get(config.peft_type.value, config.peft_type.value)
        rank, targets = getattr(config, "r", None), getattr(config, "target_modules", None)
        on = targets if isinstance(targets, str) else ", ".join(sorted(targets or ()))
        told.append(f"adapters, {kind}{f' of rank {rank}' if rank else ''}{f' on {on}' if on else ''}")
    return "; ".join(told)


def _tags_of_trl(trainer: "RopeSFTTrainer") -> list[str]:
    """Those of TRL's own card."""
    jobs = ["hf_jobs"] if "JOB_ID" in os.environ else []
    unsloth = ["unsloth"] if hasattr(trainer.model.config, "unsloth_version") else []
    tracked = trl_utils.get_trackio_space_url()
    return [*trainer._tag_names, *jobs, *unsloth, *([f"trackio:{tracked}"] if tracked else [])]


def _links() -> tuple[tuple[str, str], ...]:
    """Where the run is logged."""
    addresses = {"Trackio": trl_utils.get_trackio_space_url(), "Comet": trl_utils.get_comet_experiment_url()}
    if is_wandb_available():
        import wandb

        addresses["Weights & Biases"] = None if wandb.run is None else wandb.run.url
    return tuple((name, address) for name, address in addresses.items() if address)
