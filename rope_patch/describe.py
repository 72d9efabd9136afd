"""A description of a model's RoPE: its parameters, its patches and what its family cannot do."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from .adapters.sidecar import SIDECAR_NAME
from .adapters.watch import adapter_configs
from .families.capabilities import missing_capabilities
from .families.local_layers import LocalLayers
from .forward.state import state_of
from .rescalings.in_place import names_no_window
from .rope.rotary import find_causal_lm, find_decoder, is_nested, named_rotary_modules


@dataclass(frozen=True)
class RopeDescription:
    """What `describe` returns. `print` it.

    Args:
        model: class of the model.
        patched: whether any patch is on.
        rope_parameters: those in force, in the form of Transformers' config.
        native_rope_parameters: those that the model came with.
        rescaling: the rescaling in force, or None; the rescaling of a loaded adapter comes first.
        view: the view that is sampled, or None.
        when: in which forwards the view is sampled, or None.
        local_layers: sliding or chunked layer types, which a view leaves at true positions.
        modules: names of the rotary modules.
        trained_window: context window that the model came with, in positions; None if its config names none.
        target_window: context window that its config now declares.
        keeps_window: whether the rescaling in force leaves the window of the config unchanged.
        missing_capabilities: what its family cannot do -> why; all else works.
        adapters: names of PEFT adapters.
    """

    model: str
    patched: bool
    rope_parameters: dict[str, Any]
    native_rope_parameters: dict[str, Any]
    rescaling: str | None
    view: str | None
    when: str | None
    local_layers: tuple[str, ...]
    modules: tuple[str, ...]
    trained_window: int | None
    target_window: int | None
    keeps_window: bool
    missing_capabilities: dict[str, str]
    adapters: tuple[str, ...]

    def __str__(self) -> str:
        forwards = "every forward" if self.when == "always" else "training forwards"
        old_window = (
            " (programs that serve the model stop there; a rescaling with max_position_embeddings can write another)"
        )
        lines = [
            f"{self.model}: {'patched' if self.patched else 'not patched'}",
            f"  RoPE            {_parameters_text(self.rope_parameters)}",
            f"  rescaling       {self.rescaling or 'none'}",
            f"  view            {f'{self.view}, sampled in {forwards}' if self.view else 'none'}",
            f"  trained window  {_window(self.trained_window)}",
            f"  target window   {_window(self.target_window)}{old_window if self.keeps_window else ''}",
            f"  rotary modules  {', '.join(self.modules)}",
        ]
        if self.local_layers:
            lines.insert(4, f"  local layers    {', '.join(self.local_layers)}, which a view leaves at true positions")
        if self.rescaling:
            lines.insert(2, f"  native          {_parameters_text(self.native_rope_parameters)}")
        lines += [f"  not possible    {what}: {reason}" for what, reason in self.missing_capabilities.items()]
        if self.adapters:
            # PEFT does not record the folder of an adapter, so we cannot look for a sidecar here
            kept = (
                f"saved with RoPE beside them, in {SIDECAR_NAME}"
                if self.patched
                else f"on the base model's own RoPE. An adapter whose folder has {SIDECAR_NAME} was trained with "
                "another one: load it with rope_patch.load_adapter"
            )
            lines.append(f"  adapters        {', '.join(self.adapters)} ({kept})")
        return "\n".join(lines)


def describe(model: nn.Module) -> RopeDescription:
    """Describe the RoPE of `model`: its parameters, view and patches, its trained and target context window."""
    decoder = find_decoder(model)
    state = state_of(decoder)
    config = decoder.config
    window = getattr(config, "max_position_embeddings", None)
    view = None if state is None or state.source is None else state.source.view
    return RopeDescription(
        model=type(find_causal_lm(model)).__name__,
        patched=state is not None,
        rope_parameters=config.rope_parameters,
        native_rope_parameters=config.rope_parameters if state is None else state.native.rope_parameters,
        rescaling=None if state is None or not state.rescalings else ", then ".join(map(str, state.rescalings)),
        view=None if view is None else repr(view),
        when=None if state is None or view is None else state.when,
        local_layers=tuple(sorted(LocalLayers.of(decoder).types)),
        modules=tuple(name for name, _ in named_rotary_modules(decoder)),
        trained_window=window if state is None else state.native.max_position_embeddings,
        target_window=window,
        keeps_window=state is not None and state.rescaling is not None and names_no_window(state.rescaling, window),
        missing_capabilities=missing_capabilities(model),
        adapters=tuple(adapter_configs(model)),
    )


def _window(positions: int | None) -> str:
    return "not stated by the config" if positions is None else f"{positions} positions"


def _parameters_text(rope_parameters: dict[str, Any]) -> str:
    """`rope_parameters` in one line, long lists shortened."""
    if is_nested(rope_parameters):
        return "; ".join(
            f"{layers}: {_parameters_text(p) if p else 'no RoPE'}" for layers, p in rope_parameters.items()
        )
    rest = ", ".join(
        f"{k} {f'({len(v)} values)' if isinstance(v, list) else v}"
        for k, v in rope_parameters.items()
        if k != "rope_type"
    )
    return f"{rope_parameters['rope_type']} ({rest})"
