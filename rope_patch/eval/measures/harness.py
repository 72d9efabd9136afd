"""lm-eval in this process: the model in memory, data from local files or the hub, and no prompt truncated."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from contextvars import ContextVar
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from ...generation.generation import ask_greedily
from ...generation.reading import Question
from ...prompts.asking import TEMPLATE_OPTIONS
from .subject import Subject

Documents = Sequence[Mapping[str, Any]]


def local_task(
    name: str,
    documents: Documents | None,
    split: str,
    *,
    examples: Documents | None = None,
    shots: int | None = 0,
    folder: str = "",
    **overrides: Any,
) -> Any:
    """lm-eval's task `name` with its prompts and metrics, on `documents` instead of the hub's.

    Args:
        name: a task that lm-eval knows.
        documents: rows with the fields of the hub's dataset; None means the hub's dataset.
        split: the split that the task evaluates, e.g. "validation".
        examples: few-shot examples, for a task that takes them from the hub.
        shots: number of few-shot examples. None means as many as the task has by default, or 0 if `documents` come
            without the examples that it would take from the hub.
        folder: of lm-eval's tasks that has the task; "" looks in all, which takes ten seconds.
        **overrides: fields of the task's config to replace.
    """
    import datasets

    with quiet_import():
        if documents is not None:
            parts = {split: list(documents), **({"fewshot": list(examples)} if examples else {})}

            def data(**_: Any) -> Any:
                return {name: datasets.Dataset.from_list(rows) for name, rows in parts.items()}

            # the other splits of the task's config are not there
            splits = dict.fromkeys(("training_split", "validation_split", "test_split", "fewshot_split"))
            if examples:
                splits["fewshot_split"] = "fewshot"
            elif shots is None and "samples" not in ((task_index()[name].cfg or {}).get("fewshot_config") or {}):
                shots = 0
            overrides = {"custom_dataset": data, **splits, f"{split}_split": split, **overrides}
        if shots is not None:
            overrides = {"num_fewshot": shots, **overrides}
        group = {"group": "rope_patch", "task": [{"task": name, **overrides}]}
        return next(iter(_task_manager(folder).load([group])["tasks"].values()))


def evaluate(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[Any],
    *,
    batch_size: int | None,
    max_length: int,
    limit: int | None = None,
    samples: list[int] | None = None,
    chat: bool = False,
    greedy: bool = False,
) -> list[tuple[dict[str, float], list[dict[str, Any]]]]:
    """Run lm-eval's tasks.

    Args:
        model: a causal LM in memory.
        tokenizer: tokenizer of the model.
        tasks: tasks from `local_task`, of different names.
        batch_size: prompts in a forward pass. With `greedy`, maximum number of prompts answered at once; None means
            the number that `ask_greedily` chooses.
        max_length: tokens that a prompt and its answer may have. lm-eval's default is the window in the config, to
            which it cuts longer prompts without an error.
        limit: maximum number of samples of each task.
        samples: indices of the documents to ask, in place of `limit`; None means all.
        chat: whether prompts are a user's message in the tokenizer's chat template.
        greedy: whether `ask_greedily` answers all prompts of all tasks in one call, which is right if replies are
            greedy and have no stop text.

    Returns:
        Of each task its metrics without standard errors, and lm-eval's log of its samples.
    """
    subject = Subject(model)
    with quiet():
        import lm_eval
        from lm_eval.models.huggingface import HFLM

        named = {task.config.task: task for task in tasks}
        with subject.evaluating():
            lm = (_greedy_lm(batch_size) if greedy else HFLM)(
                pretrained=subject.causal_lm,
                tokenizer=tokenizer,
                batch_size=1 if greedy else batch_size,
                max_length=max_length,
                chat_template_args=TEMPLATE_OPTIONS if chat else None,
            )
            # not simple_evaluate, which seeds every generator of the process and calls git
            results = lm_eval.evaluate(
                lm,
                {"tasks": named, "groups": {}, "group_map": {}},
                limit=limit,
                samples=None if samples is None else dict.fromkeys(named, samples),
                bootstrap_iters=0,  # no standard errors: intervals are ours
                log_samples=True,
                apply_chat_template=chat,
            )
    assert results is not None  # it is None on ranks other than 0 only
    found = []
    for name in named:
        metrics = {
            key.removesuffix(",none"): value  # "none" is lm-eval's name for no filter
            for key, value in results["results"][name].items()
            if isinstance(value, float) and "stderr" not in key
        }
        found.append((metrics, results["samples"][name]))
    return found


def _greedy_lm(batch_size: int | None) -> Any:
    """lm-eval's model class with greedy replies by `ask_greedily`."""
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.utils import has_bos_prefix

    class GreedyLM(HFLM):
        def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
            texts, options = zip(*(request.args for request in requests), strict=True)
            # as its tok_batch_encode does, which pads all to one tensor: that takes longer than tokenizing
            begun = has_bos_prefix(texts[0], self.tokenizer.bos_token)
            added = False if begun else self.add_bos_token
            ids = self.tokenizer(list(texts), **({} if added is None else {"add_special_tokens": added}))["input_ids"]
            questions = [Question(row, of["max_gen_toks"]) for row, of in zip(ids, options, strict=True)]
            pad = self.tokenizer.pad_token_id
            replies = ask_greedily(self.model, questions, pad_token=pad, batch_size=batch_size)
            return [self.tok_decode(reply.written) for reply in replies]

    return GreedyLM


def sample_scores(logged: Sequence[Mapping[str, Any]], metric: str) -> list[float]:
    """`metric` of each logged sample, in the order of the data; the first filter counts if there are several."""
    scores: dict[int, float] = {}
    for sample in logged:
        scores.setdefault(sample["doc_id"], float(sample[metric]))
    return [scores[doc] for doc in sorted(scores)]


def data_file(folder: str | Path, stem: str) -> Path | None:
    """STEM.jsonl or STEM.jsonl.xz in `folder`, None if it has neither; FileNotFoundError if there is no folder."""
    if not Path(folder).is_dir():
        raise FileNotFoundError(f"there is no folder {folder} with data for benchmarks.")
    files = (Path(folder) / f"{stem}{ending}" for ending in (".jsonl", ".jsonl.xz"))
    return next((file for file in files if file.is_file()), None)


_INCLUDED: ContextVar[tuple[str, ...]] = ContextVar("_INCLUDED", default=())  # folders besides lm-eval's own


@contextmanager
def included_tasks(folder: str | Path | None) -> Iterator[None]:
    """Look for lm-eval's tasks in `folder` too, inside the block; None looks in no other."""
    if folder is not None and not Path(folder).is_dir():
        raise FileNotFoundError(f"there is no folder {folder} with tasks of lm-eval.")
    before = _INCLUDED.set(() if folder is None else (str(folder),))
    try:
        yield
    finally:
        _INCLUDED.reset(before)


def _task_manager(folder: str = "") -> Any:
    """lm-eval's index of the tasks in a folder of its own, or of all and of the folders that were included."""
    return _task_manager_of(folder, () if folder else _INCLUDED.get())


@cache
def _task_manager_of(folder: str, included: tuple[str, ...]) -> Any:
    from lm_eval import tasks

    return tasks.TaskManager(
        include_path=[str(Path(tasks.__file__).parent / folder), *included], include_defaults=False
    )


def task_index() -> Mapping[str, Any]:
    """Every task, group and tag that the installed lm-eval knows, by name."""
    with quiet():
        return _task_manager().task_index


def require_lm_eval() -> None:
    """Raise ImportError, which names the extra to install, if lm-eval is missing."""
    try:
        import lm_eval  # noqa: F401
    except ImportError as error:
        raise ImportError("this benchmark needs lm-eval: pip install 'rope-patch[eval]'.") from error


@contextmanager
def quiet() -> Iterator[None]:
    """Show only errors of lm-eval's loggers, and keep its modules from downloading NLTK's data at import."""
    require_lm_eval()
    import nltk  # which lm-eval requires

    loggers = [logging.getLogger(name) for name in ("lm_eval", "lm-eval", "datasets")]
    levels, download = [logger.level for logger in loggers], nltk.download
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    nltk.download = lambda *_, **__: False
    try:
        yield
    finally:
        nltk.download = download
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextmanager
def quiet_import() -> Iterator[None]:
    """`quiet`, and without the output of lm-eval's task modules, which print at import that they downloaded data."""
    with quiet(), redirect_stdout(StringIO()):
        yield
