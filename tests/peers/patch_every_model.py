"""A pytest plugin for runs of other projects' tests: every Transformers model that is built or loaded is patched.

The variable MODE names how; without it nothing is patched. The file that the variable COUNTS names gets, as JSON, how
many models of each class were patched, and how many were refused with each error.
"""

import functools
import inspect
import json
import os
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy
import torch
from transformers import PreTrainedModel

from rope_patch import patch_model
from rope_patch.views import PosAug, Standard

MODE, COUNTS = "ROPE_PATCH_PEERS_MODE", "ROPE_PATCH_PEERS_COUNTS"


class _SamePlaces(Standard):
    """r(t) = t by way of all that a view does which moves tokens; those of the package refuse to move none."""

    perturbs = True


def _standard(model: PreTrainedModel) -> None:
    """Change no index, so that our hooks alone can make a difference."""
    patch_model(model, "standard", when="always")


def _same_places(model: PreTrainedModel) -> None:
    """Write a config, new frequencies and new indices, each equal to the old ones."""
    patch_model(model, "pi", factor=1.0)
    patch_model(model, _SamePlaces(), when="always")


def _tripled(model: PreTrainedModel) -> None:
    """Multiply every index by three: another model, as sound as the first."""
    patch_model(model, PosAug(3.0), when="always")


MODES: dict[str, Callable[[PreTrainedModel], None]] = {
    "standard": _standard,
    "same-places": _same_places,
    "tripled": _tripled,
}
patched: Counter[str] = Counter()
refused: Counter[str] = Counter()


def pytest_configure() -> None:
    mode = os.environ.get(MODE)
    if mode:
        _patch_what_is_built(MODES[mode])


def pytest_runtest_setup() -> None:
    """Give a test the same random numbers in a run with patches as in one without."""
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


def pytest_sessionfinish() -> None:
    Path(os.environ[COUNTS]).write_text(json.dumps({"patched": patched, "refused": refused}))


def _is_part_of_another(model: PreTrainedModel) -> bool:
    """Whether another model is building `model` as a part: the whole is patched, as a user would."""
    frame = inspect.currentframe()
    while frame is not None:
        builder = frame.f_locals.get("self") if frame.f_code.co_name == "__init__" else None
        if isinstance(builder, PreTrainedModel) and builder is not model:
            return True
        frame = frame.f_back
    return False


def _patch_what_is_built(patch: Callable[[PreTrainedModel], None]) -> None:
    stock_post_init = PreTrainedModel.post_init
    stock_from_pretrained = PreTrainedModel.from_pretrained.__func__

    def count(model: PreTrainedModel) -> None:
        name = type(model).__name__
        try:
            patch(model)
        except ValueError as error:
            refused[f"{name}: {error}"] += 1
        else:
            patched[name] += 1

    @functools.wraps(stock_post_init)
    def post_init(self):
        stock_post_init(self)
        parameter = next(self.parameters(), None)
        on_meta = parameter is not None and parameter.device.type == "meta"  # it is patched when it is loaded
        if not on_meta and not _is_part_of_another(self):
            count(self)

    @functools.wraps(stock_from_pretrained)
    def from_pretrained(cls, *arguments, **options):
        result = stock_from_pretrained(cls, *arguments, **options)
        count(result[0] if isinstance(result, tuple) else result)  # a tuple with output_loading_info=True
        return result

    PreTrainedModel.post_init = post_init
    PreTrainedModel.from_pretrained = classmethod(from_pretrained)
