"""lm-eval's in-process API: the model as it is in memory, data from where the user has it, nothing truncated."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import cache
from io import StringIO
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from ...generation.generation import greedy_tokens
from ...prompts.asking import TEMPLATE_OPTIONS
from .subject import Subject

Documents = Sequence[Mapping[str, Any]]
_ALL = 1 << 20  # requests that lm-eval hands over at once: all of a task


def local_task(
    name: str,
    documents: Documents | None,
    split: str,
    *,
    examples: Documents | None = None,
    shots: int | None = 0,
    **overrides: Any,
) -> Any:
    """lm-eval's own task `name`, its prompts and metrics, on `documents` instead of the hub's.

    Args:
        name: of a task that lm-eval knows.
        documents: rows with the fields of the hub's dataset; None means the hub's own.
        split: the split that the task evaluates, e.g. "validation".
        examples: rows to be shown before a question, for a task that has no examples of its own.
        shots: examples before a question; None means as many as the task shows by itself, and none where `documents`
            are given without the examples that it would take from the hub.
        **overrides: fields of the task's config to replace.

    Raises:
        ImportError: lm-eval is not installed.
    """
    import datasets

    with quiet_import():
        if documents is not None:
            rows, shown = list(documents), list(examples or ())

            def data(**_: Any) -> Any:
                parts = {split: datasets.Dataset.from_list(rows)}
                return {**parts, "fewshot": datasets.Dataset.from_list(shown)} if shown else parts

            # the other splits that a task names are not needed
            splits = dict.fromkeys(("training_split", "validation_split", "test_split", "fewshot_split"))
            if shown:
                splits["fewshot_split"] = "fewshot"
            elif shots is None and "samples" not in (_config(name).get("fewshot_config") or {}):
                shots = 0
            overrides = {"custom_dataset": data, **splits, f"{split}_split": split, **overrides}
        if shots is not None:
            overrides = {"num_fewshot": shots, **overrides}
        group = {"group": "rope_patch", "task": [{"task": name, **overrides}]}
        return next(iter(_task_manager().load([group])["tasks"].values()))


def evaluate(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    task: Any,
    *,
    batch_size: int | None,
    max_length: int,
    limit: int | None = None,
    samples: list[int] | None = None,
    chat: bool = False,
    greedy: bool = False,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run one lm-eval task.

    Args:
        model: a causal LM in memory.
        tokenizer: of the model.
        task: from `local_task`.
        batch_size: prompts in a forward; with `greedy`, prompts answered at once, at most, and None means as many as
            memory holds.
        max_length: tokens that a prompt and its answer may have; lm-eval's own default is the window in the config, to
            which it cuts longer prompts without an error.
        limit: samples at most.
        samples: places of the documents that are asked, in place of `limit`; None means all.
        chat: whether prompts are a user's message in the tokenizer's chat template.
        greedy: whether the task's answers are greedy and end with the model's own end token alone: all of them are
            then made by `greedy_tokens`.

    Returns:
        lm-eval's metrics of the task and its samples.
    """
    subject = Subject(model)
    with quiet():
        import lm_eval
        from lm_eval.models.huggingface import HFLM

        with subject.evaluating():
            lm = (_greedy_lm(batch_size) if greedy else HFLM)(
                pretrained=subject.causal_lm,
                tokenizer=tokenizer,
                batch_size=_ALL if greedy else batch_size,
                max_length=max_length,
                chat_template_args=TEMPLATE_OPTIONS if chat else None,
            )
            name = task.config.task
            tasks = {"tasks": {name: task}, "groups": {}, "group_map": {}}
            # not simple_evaluate: it seeds every generator of the process and calls git
            results = lm_eval.evaluate(
                lm,
                tasks,
                limit=limit,
                samples=None if samples is None else {name: samples},
                bootstrap_iters=0,
                log_samples=True,
                apply_chat_template=chat,
            )
    assert results is not None  # None is for ranks other than the first
    return results["results"][name], results["samples"][name]


def _greedy_lm(at_once: int | None) -> Any:
    """lm-eval's wrapper of a model, except that answers come from `greedy_tokens`, `at_once` at most at a time."""
    from lm_eval.models.huggingface import HFLM

    class GreedyLM(HFLM):
        def _model_generate(self, context: torch.Tensor, max_length: int, stop: Any, **options: Any) -> torch.Tensor:
            """Prompts with padding on their left, and behind them the answers, padded on their right."""
            pad = self.tokenizer.pad_token_id
            replies = greedy_tokens(
                self.model,
                [ids[real.bool()].tolist() for ids, real in zip(context, options["attention_mask"], strict=True)],
                pad_token=pad,
                max_new_tokens=max_length - context.shape[1],
                batch_size=at_once,
            )
            width = max(map(len, replies))
            rows = torch.tensor([[*reply, *[pad] * (width - len(reply))] for reply in replies])
            return torch.cat([context, rows.to(context.device)], dim=1)

    return GreedyLM


def sample_scores(logged: Sequence[Mapping[str, Any]], metric: str) -> list[float]:
    """`metric` of each sample that lm-eval logged, in the order of the data; by the first filter of several."""
    scores: dict[int, float] = {}
    for sample in logged:
        scores.setdefault(sample["doc_id"], float(sample[metric]))
    return [scores[doc] for doc in sorted(scores)]


@cache
def _task_manager() -> Any:
    """lm-eval's index of tasks, which takes ten seconds to read."""
    from lm_eval.tasks import TaskManager

    return TaskManager()


def task_index() -> Mapping[str, Any]:
    """Every task, group and tag that the installed lm-eval knows, by name."""
    with quiet():
        return _task_manager().task_index


def _config(name: str) -> Mapping[str, Any]:
    return task_index()[name].cfg or {}


def require_lm_eval() -> None:
    """Raise ImportError with the extra to install unless lm-eval is there."""
    try:
        import lm_eval  # noqa: F401
    except ImportError as error:
        raise ImportError("this benchmark needs lm-eval: pip install 'rope-patch[eval]'.") from error


@contextmanager
def quiet() -> Iterator[None]:
    """Keep lm-eval from downloading NLTK's data at import, and its loggers below errors."""
    require_lm_eval()
    loggers = [logging.getLogger(name) for name in ("lm_eval", "lm-eval", "datasets")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    undo = _without_downloads()
    try:
        yield
    finally:
        undo()
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextmanager
def quiet_import() -> Iterator[None]:
    """`quiet`, without what modules of lm-eval's tasks print at import: that data were downloaded, where none were."""
    with quiet(), redirect_stdout(StringIO()):
        yield


def _without_downloads() -> Callable[[], None]:
    try:
        import nltk
    except ImportError:
        return lambda: None
    before = nltk.download
    nltk.download = lambda *_, **__: False

    def undo() -> None:
        nltk.download = before

    return undo
