"""The stages of a recipe: one training, or several `stages`, each with the keys in which it differs."""

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments

from ..config import RopeSFTConfig
from ..runs.checkpoint import trusts_code
from ..runs.folder import last_checkpoint
from .recipe import RecipeParser, shown

FIELDS = (ScriptArguments, RopeSFTConfig, ModelConfig, DatasetMixtureConfig)
"""Their fields are keys of a recipe and flags of the command line."""

_NAME = re.compile(r"[\w-][\w.-]*")
_OF_ALL = {
    *(field.name for field in fields(ModelConfig)), "output_dir", "resume_from_checkpoint", "env", "stages", "export"
}  # fmt: skip
_EXPORT = {"window", "check"}


@dataclass(frozen=True)
class Stage:
    """A stage of a recipe, or all of a recipe without stages.

    Args:
        name: of the stage, also of its folder in `output_dir`; "" of a recipe without stages.
        script: how the text is read.
        training: whose `output_dir` is the folder of the stage.
        model: and its adapters.
        data: the text.
        settings: keys and flags that are not defaults, as JSON has them.
        export: options of `rope_patch.export` for the result of all stages: "window" and "check".
    """

    name: str
    script: ScriptArguments
    training: RopeSFTConfig
    model: ModelConfig
    data: DatasetMixtureConfig
    settings: dict[str, Any]
    export: Mapping[str, Any]

    @property
    def folder(self) -> Path:
        """The folder of its checkpoints and its result."""
        return Path(str(self.training.output_dir))

    @property
    def figures(self) -> Path:
        """The file that a finished stage has."""
        return self.folder / "stage.json"

    @property
    def is_begun(self) -> bool:
        """Whether the stage has a checkpoint or is finished."""
        return self.figures.is_file() or last_checkpoint(self.folder) is not None

    @property
    def loading(self) -> dict[str, Any]:
        """Arguments of `from_pretrained`."""
        given: Any = self.training.model_init_kwargs or {}  # parsed from JSON by now
        model_options = {"revision": self.model.model_revision, "attn_implementation": self.model.attn_implementation}
        return {**model_options, "dtype": self.model.dtype, **given}


def read_stages(
    recipe: Mapping[Any, Any], flags: Sequence[str] = (), source: str = "the recipe", **overrides: Any
) -> list[Stage]:
    """The stages of a recipe, or the recipe itself where it has none.

    Args:
        recipe: its keys.
        flags: of the command line, which win over all else.
        source: of the keys, for messages.
        **overrides: keys that win over those of the recipe and of each stage.

    Raises:
        ValueError: a key, a flag or a value is wrong, or nothing would be trained.
    """
    os.environ.pop("ACCELERATE_MIXED_PRECISION", None)  # of a launcher, for recipes with neither bf16 nor fp16
    common = {**recipe, **overrides}
    given, export = common.pop("stages", None), common.pop("export", {})
    if not isinstance(export, Mapping) or export.keys() - _EXPORT or (export and given is None):
        raise ValueError(
            f"export in {source} must be a mapping with {' or '.join(sorted(_EXPORT))}, beside `stages`, got "
            f"{shown(export)}."
        )
    overrides = {key: value for key, value in overrides.items() if key not in ("stages", "export")}
    stages: list[Stage] = []
    for name, own in ({"": {}} if given is None else _named(given, source)).items():
        label = f"stage {name} of {source}" if name else source
        stage = _parsed(name, {**common, **own, **overrides}, flags, label, export)
        if name:
            if stage.training.resume_from_checkpoint is not None:
                raise ValueError(
                    "resume_from_checkpoint is for a recipe without stages: with stages the same command resumes. "
                    "Leave it out."
                )
            stage.training.output_dir = str(Path(str(stage.training.output_dir), name))
            if stages and not {"rescale", "rescale_args"} & own.keys():
                # the stage before has left the model rescaled
                stage.training.rescale = stage.training.rescale_args = None
        stages.append(stage)
    return stages


def require_fitting_stages(stages: Sequence[Stage], window: int | None) -> None:
    """Raise ValueError if a stage would silently go wrong, or fail late.

    Args:
        stages: of a recipe.
        window: context window of the model, None if its config has none.
    """
    adapters = stages[0].model.use_peft
    dtype = stages[0].loading["dtype"]
    if not adapters and str(dtype).removeprefix("torch.") not in ("float32", "float64"):
        raise ValueError(
            f"dtype={str(dtype)!r}: without adapters the weights themselves are trained, and 16 bits round steps at a "
            "learning rate of 2e-5 away: after 40 steps only 20 % of bfloat16 weights had changed. Set dtype: float32, "
            "which is trained under bfloat16 autocast and exported in the checkpoint's own dtype, or use_peft: true, "
            "whose adapters are float32 on a base in 16 bits."
        )
    if is_deepspeed_zero3_enabled():
        raise ValueError(
            "a recipe with stages loads and exports whole models, of which each rank would have a part under ZeRO-3: "
            "use ZeRO-2, or a recipe for each stage."
        )
    for i, stage in enumerate(stages):
        if trusts_code(stage.training):
            raise ValueError(
                "a recipe with stages exports what it has trained, and other programs do not run a model's own Python "
                "code: leave trust_remote_code out, or write a recipe for each stage."
            )
        objective, length = stage.training.objective, stage.training.max_length or 0
        if not stage.training.objective_options.needs_teacher:
            continue
        if i and not adapters:
            raise ValueError(
                f"{stage.name}: the teacher of objective {objective!r} is the original model, and this stage begins "
                "from the weights of the stage before, which would teach instead: set use_peft: true, whose adapters "
                "keep the original weights, or an objective without a teacher."
            )
        if window is not None and length > window:
            raise ValueError(
                f"{stage.name}: max_length must be within the original window of {window} positions, beyond which the "
                f"teacher's predictions are bad, got {length}."
            )


def _named(stages: Any, source: str) -> dict[str, dict[str, Any]]:
    """Name -> keys of each stage."""
    if not isinstance(stages, list) or not stages or not all(isinstance(stage, Mapping) for stage in stages):
        raise ValueError(
            f"stages in {source} must be a list of mappings, each with the keys in which a stage differs, got "
            f"{shown(stages)}."
        )
    named: dict[str, dict[str, Any]] = {}
    for number, stage in enumerate(stages, 1):
        name = str(stage.get("name", f"stage-{number}"))
        if not _NAME.fullmatch(name) or name in named or name == "model":
            raise ValueError(
                f"the name of stage {number} in {source} must be a name for a folder, of no other stage and not "
                f"'model', which is that of the result, got {name!r}."
            )
        named[name] = {key: value for key, value in stage.items() if key != "name"}
        for key in named[name]:
            if key in _OF_ALL:
                raise ValueError(f"{key} in stage {name} of {source} is for all stages: put it beside `stages`.")
    return named


def _parsed(name: str, keys: Mapping[Any, Any], flags: Sequence[str], source: str, export: Mapping[str, Any]) -> Stage:
    parser = RecipeParser(FIELDS, prog="rope-patch train")
    defaults = vars(parser.parse_known_args([])[0])  # before the recipe's values become the parser's
    try:
        script, training, model, data = parser.parse(keys, flags, source)
    except ValueError as error:
        if "support bf16/gpu" not in str(error):  # of Transformers, for lack of a GPU
            raise
        raise ValueError(
            "there is no GPU that torch can see. `--use-cpu true --bf16 false` trains on the CPU, which is slow."
        ) from error
    if not str(training.output_dir):  # Path("") is the current folder
        raise ValueError("output_dir must name a folder, got an empty name.")
    # fields of evaluations, of which a run with `eval_strategy` "no" has none
    options = ("eval_steps", "eval_delay", "eval_on_start", "eval_packing", "eval_accumulation_steps")
    default = {field.name: field.default for field in fields(training)}
    unused = [name for name in options if getattr(training, name) != default[name]]
    unused += ["load_best_model_at_end"] if training.load_best_model_at_end else []
    unused += ["test_split_size"] if data.test_split_size else []
    if unused and training.eval_strategy == "no":
        raise ValueError(
            f"{' and '.join(unused)} would have no effect: add eval_strategy: steps or epoch, without which a run is "
            "not evaluated."
        )
    given = vars(parser.parse_known_args(list(flags))[0])  # the recipe's values are the parser's defaults by now
    # folders and files may be moved: of what is not streamed the rows are compared, see `dataset.digests`
    may_change = ("output_dir",) if data.streaming else ("output_dir", "datasets")
    settings = {key: value for key, value in given.items() if key not in may_change and value != defaults.get(key)}
    # of all ranks: a run may be resumed on another number of them
    sharing = [int(os.environ.get(f"PARALLELISM_CONFIG_{kind}_SIZE", 1)) for kind in ("CP", "SP")]
    settings["gradient_accumulation_steps"] = (
        training.gradient_accumulation_steps * training.world_size // math.prod(sharing)
    )
    return Stage(name, script, training, model, data, json.loads(json.dumps(settings, default=str)), export)
