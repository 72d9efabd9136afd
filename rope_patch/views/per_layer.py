"""A view in some layers only, or drawn for each layer."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..base import papers
from ..base.draws import DrawKey
from ..layout.documents import Documents
from .base import TRUE_POSITIONS, VIEWS, Parameters, View
from .several import Several, as_part

_MOST_LAYERS = 256  # that get separate draws
_HALVES = ("bottom", "top")


@VIEWS.register("per-layer")
@dataclass(frozen=True)
class PerLayer(Several):
    """r_l(t) = v(t) in some layers l and t in the others, or v drawn anew for each layer.

    Args:
        view: v; in a recipe `{view: posaug, alpha: 4}` stands for `PosAug(4)`.
        layers: "bottom" or "top" half, a list of layer indices, or "independent": all layers, each with a separate
            draw. Layers with a sliding window stay at true positions unless the list names them.

    When: Take it to find out which layers need a view.

    Source: Position Augmentation (PosAug), FoGen 2026, its ablation by layers.
    """

    view: Any
    layers: str | Sequence[int] = "independent"

    cites = (papers.POSAUG,)

    def __post_init__(self) -> None:
        object.__setattr__(self, "view", as_part(self.view, "per-layer"))
        if isinstance(self.layers, Sequence) and not isinstance(self.layers, str):
            object.__setattr__(self, "layers", tuple(self.layers))
        indices = isinstance(self.layers, tuple) and all(type(i) is int and i >= 0 for i in self.layers)
        if self.layers not in (*_HALVES, "independent") and not (indices and self.layers):
            raise ValueError(
                f"view 'per-layer': layers must be one of {(*_HALVES, 'independent')} or indices, got {self.layers!r}."
            )
        if self.layers == "independent":
            self._require_separate_draws()

    def _require_separate_draws(self) -> None:
        """Raise unless `draw`, given a key for each of 3 layers, draws for each of them and nothing across them."""
        # of two documents, [2, 1], and a stream for each of three layers, [3, 1, 1]
        key = DrawKey(0, torch.tensor(0), torch.arange(2)[:, None], torch.arange(3)[:, None, None])
        try:
            shapes = {p.shape for p in self.view.draw(torch.full((2, 1), 8), key).values()}
        except (RuntimeError, ValueError, IndexError):
            shapes = set()
        apart = {shape for shape in shapes if len(shape) == 3 and shape[0] == 3}
        if not apart or not shapes - apart <= {(), (1, 1), (2, 1)}:
            raise ValueError(
                f"view 'per-layer': {self.view!r} draws nothing, or a table, so it cannot be drawn for each layer: "
                "name the layers."
            )

    @property
    def views(self) -> Sequence[View]:  # type: ignore[override]
        return (self.view,)

    @property
    def layerwise(self) -> bool:
        return True

    def reach(self, length: int, last: int | None = None) -> int | None:
        moved = self.view.reach(length, last)
        others = length - 1 if last is None else last  # layers at true positions
        return moved if moved is None or self.layers == "independent" else max(moved, others)

    @property
    def names_layers(self) -> bool:
        return not isinstance(self.layers, str)

    def check_layers(self, n_layers: int, local: Collection[int] = ()) -> None:
        if not isinstance(self.layers, str) and max(self.layers) >= n_layers:
            raise ValueError(
                f"view 'per-layer': layers must be below {n_layers}, those of this model, got {max(self.layers)}."
            )
        if not self.names_layers and set(self._moved_layers(n_layers)) <= set(local):
            raise ValueError(
                f"view 'per-layer': layers={self.layers!r} would change nothing: it leaves no layers but local ones, "
                "which stay at true positions. List layers by index."
            )

    def draw(self, length: torch.Tensor, key: DrawKey) -> Parameters:
        return self.view.draw(length, self._own(key))

    def draw_for(self, ids: torch.Tensor | None, t: torch.Tensor, documents: Documents, key: DrawKey) -> Parameters:
        return self.view.draw_for(ids, t, documents, self._own(key))

    def _own(self, key: DrawKey) -> DrawKey:
        """The key of each layer, [layers, 1, 1], if layers get separate draws."""
        if self.layers != "independent":
            return key
        streams = key.substream(0).stream + torch.arange(_MOST_LAYERS, device=key.device)  # [layers]
        return replace(key, stream=streams[:, None, None])

    def layer_groups(self, n_layers: int, parameters: Parameters) -> list[tuple[list[int], View, Parameters]]:
        if self.layers == "independent":
            # [layers, batch, 1 or seq_len] are drawn by layer
            by_layer = [{name: p[i] if p.ndim == 3 else p for name, p in parameters.items()} for i in range(n_layers)]
            return [([i], self.view, by_layer[i]) for i in range(n_layers)]
        chosen = self._moved_layers(n_layers)
        others = [i for i in range(n_layers) if i not in chosen]
        return [(chosen, self.view, parameters), (others, VIEWS[TRUE_POSITIONS](), {})]

    def _moved_layers(self, n_layers: int) -> list[int]:
        half = n_layers // 2
        named = {"bottom": range(half), "top": range(half, n_layers), "independent": range(n_layers)}
        return sorted(set(named[self.layers] if isinstance(self.layers, str) else self.layers))
