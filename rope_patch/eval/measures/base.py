"""What `rope-patch eval` must know of a measure: each declares itself in its own file, and `suite.py` lists them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from ..results.cache import Remember
from ..results.result import Result

if TYPE_CHECKING:
    from ..suite import EvalPlan


@dataclass
class Job:
    """One model, what it is measured on, and what is measured already.

    Args:
        model: the model.
        tokenizer: of all models of the run.
        texts: held-out documents, long ones first.
        plan: what is measured.
        rows: held-out rows, int64 [n_rows, length]; empty where no measure of the plan reads them.
        begin: token IDs that the tokenizer puts before a text, and so before each row.
        window: the window that all models are compared over; None if it is not known.
        checkpoint: hub id or folder of the model, for vLLM; None if it is in memory alone.
        memory: measure -> what keeps its parts.
        is_kept: whether a measure was done in an earlier run.
        name: of the measure that runs.
        done: results by measure.
        shared: what measures that are made together leave for each other.
    """

    model: nn.Module
    tokenizer: PreTrainedTokenizerBase
    texts: list[str]
    plan: "EvalPlan"
    rows: torch.Tensor
    begin: tuple[int, ...]
    window: int | None
    checkpoint: str | None
    memory: Callable[[str], Remember]
    is_kept: Callable[[str], bool]
    name: str = ""
    done: dict[str, Result] = field(default_factory=dict)
    shared: dict[Any, Any] = field(default_factory=dict)

    @property
    def remember(self) -> Remember:
        """Keeps parts of the measure that runs."""
        return self.memory(self.name)


@dataclass(frozen=True, kw_only=True)
class Measure:
    """A measure of `rope-patch eval`.

    Args:
        name: in results, files and `EvalPlan.measures`.
        result: the class of its results, which draws its figure and writes its table.
        run: measures a model.
        help: what it measures, for somebody who has never heard of it; "" if another measure has the same flag.
        flag: of the command line, without hyphens; "" means `name`.
        argument: what argparse is told of the flag.
        by_default: whether it runs where no measure is named.
        reads_rows: whether it reads `Job.rows`, and so depends on `length` and `n_rows`.
        asks: whether it asks questions, through the chat template if the plan says so.
        settings: fields of `EvalPlan` that its results depend on.
        parts: further ones, which only say which parts it has; each part is kept by itself.
        files: further ones, which name files; results depend on what is in them.
        least: window, None if it is not known -> tokens that a row must have.
        check: raises for want of a package, a file, a name or enough text, before a model is loaded.
        check_model: raises for a model, with its weights or without, that it cannot measure.
    """

    name: str
    result: type[Result]
    run: Callable[[Job], Result]
    help: str = ""
    flag: str = ""
    argument: Mapping[str, Any] = field(default_factory=lambda: {"action": "store_true"})
    by_default: bool = False
    reads_rows: bool = False
    asks: bool = False
    settings: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    least: Callable[[int | None], int] = lambda window: 0
    check: Callable[["EvalPlan", PreTrainedTokenizerBase, list[str]], None] = lambda plan, tokenizer, texts: None
    check_model: Callable[[nn.Module], None] | None = None
