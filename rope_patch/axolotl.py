"""The plugin for axolotl, which alone imports this module: its YAML names a rescaling, a view and an objective."""

from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel, ConfigDict, model_validator

from .base.registry import resolve
from .losses import ViewConsistency
from .losses.in_trainers import SelfDistillSteps
from .methods import resolve_rescaling, resolve_view
from .patch import patch_model
from .rescalings import Rescaling
from .views import View
from .views.base import TRUE_POSITIONS


class RopePatchOptions(BaseModel):
    """What axolotl's YAML may hold under `rope_patch`: fields of `RopeSFTConfig` of the same names.

    Args:
        rescale: rescaling to apply to the model as it is loaded, by name; None leaves its frequencies.
        rescale_args: its options, such as `{factor: 4.0}`.
        view: view to sample in every training forward, by name; "standard" changes nothing.
        view_args: its options, such as `{skip: {law: uniform, high: 32768}}`.
        view_seed: seed of the view's draws.
        objective: "clm" is axolotl's own loss, on the sampled view; "self-distill" is `self_distillation_loss`.
        objective_args: options of "self-distill", such as `{kl_weight: 0.5}`: fields of `ViewConsistency`.
    """

    model_config = ConfigDict(extra="forbid")

    rescale: str | None = None
    rescale_args: dict[str, Any] = {}
    view: str = TRUE_POSITIONS
    view_args: dict[str, Any] = {}
    view_seed: int = 0
    objective: str = "clm"
    objective_args: dict[str, Any] = {}

    @model_validator(mode="after")
    def _check(self) -> "RopePatchOptions":
        if self.rescale_args and self.rescale is None:
            raise ValueError(f"rescale_args needs rescale, the name of the rescaling; got {self.rescale_args}.")
        consistency, perturbs = self.make_consistency(), self.make_view().perturbs
        self.make_rescaling()
        if consistency is None and self.objective_args:
            raise ValueError(f"objective_args needs objective: self-distill; got {self.objective_args}.")
        if consistency is not None and not perturbs:
            raise ValueError(f"objective: self-distill needs a view that moves tokens, such as skip; got {self.view}.")
        if consistency is None and self.rescale is None and not perturbs:
            raise ValueError("rope_patch needs a rescale, a view or both: without them nothing would be patched.")
        return self

    def make_rescaling(self) -> Rescaling | None:
        """The rescaling, None without one."""
        return None if self.rescale is None else resolve_rescaling(self.rescale, self.rescale_args)

    def make_view(self) -> View:
        """The view."""
        return resolve_view(self.view, self.view_args)

    def make_consistency(self) -> ViewConsistency | None:
        """The weights of "self-distill", None for "clm"."""
        known = {"clm": type(None), "self-distill": ViewConsistency}
        if self.objective == "clm":
            return None
        made = resolve("objective", known, (ViewConsistency,), self.objective, self.objective_args)
        assert isinstance(made, ViewConsistency)
        return made


class RopePatchArgs(BaseModel):
    """What the plugin adds to axolotl's configuration."""

    rope_patch: RopePatchOptions


class RopePatchPlugin(BasePlugin):
    """Patches each model that axolotl loads, before adapters are put on it."""

    def get_input_args(self) -> str:
        return f"{__name__}.{RopePatchArgs.__name__}"

    def register(self, cfg: Any) -> None:
        if (cfg.get("rope_patch") or {}).get("rescale"):
            if cfg.get("merge_method") not in (None, "legacy"):
                raise ValueError(
                    f"merge_method must be legacy beside rope_patch's rescale, got {cfg['merge_method']}: others copy "
                    "the base model's config, and the merged model would not be rescaled."
                )
            cfg["merge_method"] = "legacy"

    def post_model_build(self, cfg: Any, model: Any) -> None:
        options = _options(cfg)
        rescaling, view = options.make_rescaling(), options.make_view()
        if rescaling is not None:
            patch_model(model, rescaling)
        if view.perturbs and options.objective == "clm":
            patch_model(model, view, seed=options.view_seed)

    def get_trainer_cls(self, cfg: Any) -> type | None:
        options = _options(cfg)
        consistency = options.make_consistency()
        if consistency is None:
            return None
        if cfg.get("rl") or cfg.get("reward_model") or cfg.get("process_reward_model"):
            raise ValueError("rope_patch: objective self-distill is for supervised fine-tuning: leave it out.")
        from axolotl.core.trainers import AxolotlTrainer

        draws = {"view": options.make_view(), "seed": options.view_seed, "consistency": consistency}
        return type("SelfDistillTrainer", (SelfDistillSteps, AxolotlTrainer), {"draws": draws})


def _options(cfg: Any) -> RopePatchOptions:
    return RopePatchOptions(**cfg["rope_patch"].to_dict())
