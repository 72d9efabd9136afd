"""How `rope-patch eval` sees a measure: each measure declares itself in its own file, and `suite.py` lists them."""

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
    """One model and everything that its measures read.

    Args:
        model: the model.
        tokenizer: tokenizer of all models of the run.
        texts: held-out documents, long ones first.
        plan: what is measured.
        rows: held-out rows of token IDs, int64 [n_rows, length]; empty if no measure of the plan reads rows.
        begin: token IDs that the tokenizer puts before a text, and so at the start of each row.
        window: window over which all models are compared, in positions; None if unknown.
        checkpoint: hub id or folder of the model, for vLLM; None if it is in memory only.
        memory: measure -> function that stores its parts.
        is_kept: measure -> whether an earlier run stored its result.
        without_model: measure -> function that stores what it makes once for all models, such as prompts.
        name: the running measure.
        done: measure -> its result, for the measures that have run.
        shared: results that one measure leaves for others that are measured together with it.
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
    without_model: Callable[[str], Remember]
    name: str = ""
    done: dict[str, Result] = field(default_factory=dict)
    shared: dict[Any, Any] = field(default_factory=dict)

    @property
    def remember(self) -> Remember:
        """Stores parts of the running measure."""
        return self.memory(self.name)

    @property
    def for_all_models(self) -> Remember:
        """Stores what the running measure makes without the model."""
        return self.without_model(self.name)


@dataclass(frozen=True, kw_only=True)
class Measure:
    """A measure of `rope-patch eval`.

    Args:
        name: name in results, files and `EvalPlan.measures`.
        result: class of its results, which draws the figure and writes the table.
        run: measures a model.
        help: what it measures, for readers who do not know it; "" if another measure has the same flag.
        flag: flag of the command line, without hyphens; "" means `name`.
        argument: keyword arguments of argparse's `add_argument` for the flag.
        by_default: whether it runs when no measure is named.
        reads_rows: whether it reads `Job.rows`, and so depends on `length` and `n_rows`.
        asks: whether it asks questions, for which the plan may use the chat template.
        options: options of its own, name -> keyword arguments of `add_argument`; `EvalPlan.options` has their values.
        settings: fields of `EvalPlan`, and own options, that each of its results depends on.
        parts: fields that only choose which parts there are; every part is stored by itself.
        files: fields and options that name files; results depend on their contents.
        whole: whether results are stored whole, and not only the parts that `run` gives to `Job.remember`.
        least: (window, or None if unknown) -> tokens that a row needs.
        shortest: (plan, tokenizer) -> tokens of its shortest prompt; shorter ones of the default lengths are left out.
        check: raises if a package, a file, a name or text is missing; it runs before a model is loaded.
        check_model: raises for a model that it cannot measure, with or without its weights.
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
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    settings: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    whole: bool = True
    least: Callable[[int | None], int] = lambda window: 0
    shortest: Callable[["EvalPlan", PreTrainedTokenizerBase], int] = lambda plan, tokenizer: 0
    check: Callable[["EvalPlan", PreTrainedTokenizerBase, list[str]], None] = lambda plan, tokenizer, texts: None
    check_model: Callable[[nn.Module], None] | None = None
