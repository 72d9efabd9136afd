"""RULER's prompts by lm-eval's generators, without the network: your text as haystack, and QA data from files."""

import os
import pickle
import random
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stdout
from functools import lru_cache, partial
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from ...prompts.asking import ChatTemplate, Frame, uses_chat_template
from ...prompts.text import is_json_lines, read_json, read_json_lines
from .harness import quiet_import, require_lm_eval
from .squad import read_squad, readable


def _needles(haystack: str, key: str = "words", value: str = "numbers", **numbers: int) -> dict[str, Any]:
    """Arguments of lm-eval's needle generator."""
    return {"type_haystack": haystack, "type_needle_k": key, "type_needle_v": value, **numbers}


# the arguments are those of lm-eval's task files
_NEEDLES: dict[str, dict[str, Any]] = {
    "niah_single_1": _needles("repeat"),
    "niah_single_2": _needles("essay"),
    "niah_single_3": _needles("essay", value="uuids"),
    "niah_multikey_1": _needles("essay", num_needle_k=4),
    "niah_multikey_2": _needles("needle"),
    "niah_multikey_3": _needles("needle", key="uuids", value="uuids"),
    "niah_multivalue": _needles("essay", num_needle_v=4),
    "niah_multiquery": _needles("essay", num_needle_q=4),
}
_SEED = 42  # lm-eval's
_TOKENS = 1 << 20  # of prompts for which it is worth starting a process, which takes seconds
SHORTEST_LENGTH = 4096
"""RULER's shortest length, in tokens; its generators cannot fill much shorter prompts."""
_VT_EXAMPLE = 500  # tokens of the example that lm-eval puts before a prompt of variable tracking
_FWE_SHORTEST = 200  # lm-eval draws one word for 50 tokens, and the prompt asks for the first three by frequency
TASKS = (*_NEEDLES, "ruler_vt", "ruler_cwe", "ruler_fwe", "ruler_qa_squad", "ruler_qa_hotpot")
# task -> the argument of `ruler_prompts` that it needs
_NEEDS = {
    **{name: "haystack" for name, options in _NEEDLES.items() if options["type_haystack"] == "essay"},
    "ruler_qa_squad": "squad",
    "ruler_qa_hotpot": "hotpotqa",
}
RulerPrompts = dict[tuple[int, str], list[dict[str, Any]]]
"""(length, task) -> lm-eval's documents."""


def ruler_prompts(
    tokenizer: PreTrainedTokenizerBase,
    lengths: Sequence[int],
    *,
    tasks: Sequence[str] | None = None,
    samples: int = 100,
    haystack: str | None = None,
    squad: str | Path | None = None,
    hotpotqa: str | Path | None = None,
    chat_template: ChatTemplate = "auto",
    seed: int = 0,
    progress: bool = True,
) -> RulerPrompts:
    """The prompts of `ruler` by lm-eval's generators. Many long prompts are made by all processors.

    lm-eval takes essays and QA data from the network, makes 500 prompts whatever the limit, and cuts prompts to the
    window in the config. Here the haystack is your text, QA data are files, and `samples` prompts are made.

    Args:
        tokenizer: tokenizer of the model.
        lengths: tokens of a prompt and its answer together.
        tasks: names from `TASKS`; None means all whose data are given.
        samples: prompts of each task and length; RULER takes 500.
        haystack: text in place of the essays, for the five tasks that hide needles in running text.
        squad: SQuAD's JSON file, or .jsonl(.xz, .gz) with `title`, `context` and `qas` [question, answers].
        hotpotqa: HotpotQA's JSON file, or .jsonl(.xz, .gz) with `question`, `answer`, `context` [title, sentences].
        chat_template: whether to use the tokenizer's chat template: "on", "off", or "auto", if there is one. Lengths
            include it.
        seed: of the prompts; 0 draws lm-eval's.
        progress: whether to show a bar over tasks and lengths.

    Returns:
        (length, task) -> lm-eval's documents, as JSON values.

    Raises:
        ImportError: lm-eval is not installed.
        ValueError: an unknown task, a task whose data were not given, or a length that is too short or longer than the
            text.

    Source: RULER, arXiv:2404.06654.
    """
    require_lm_eval()
    data = {"haystack": haystack, "squad": squad, "hotpotqa": hotpotqa}
    chosen = chosen_tasks(tasks, **data)
    frame = Frame.of(tokenizer, uses_chat_template(tokenizer, chat_template)).tokens
    require_haystack(tokenizer, lengths, chosen, haystack)
    files = {task: Path(str(data[_NEEDS[task]])) for task in chosen if task in _QA}
    _warn_of_short_files(tokenizer, max(lengths, default=0), files)
    # the longest first, which take most of the time
    cells = [(length, task) for length in sorted(lengths, reverse=True) for task in chosen]
    make = partial(_made, tokenizer, frame, samples, data, seed)
    n_processes = min(os.cpu_count() or 1, len(cells), samples * sum(length for length, _ in cells) // _TOKENS)
    with tqdm(total=len(cells), desc="RULER prompts", unit="task", disable=not progress) as bar:
        if n_processes > 1 and type(tokenizer).__module__.startswith("transformers."):  # others may be defined anywhere
            made = dict(_by_processes(make, cells, n_processes, bar))
        else:
            made = {}
            for cell in cells:
                made |= make([cell])
                bar.update()
    return {(length, task): made[length, task] for length in lengths for task in chosen}


def _made(
    tokenizer: PreTrainedTokenizerBase,
    frame: int,
    samples: int,
    data: dict[str, str | Path | None],
    seed: int,
    cells: Sequence[tuple[int, str]],
) -> RulerPrompts:
    """The prompts of some cells."""
    return {
        (n, task): _documents(task, tokenizer, n, frame, samples, data.get(_NEEDS.get(task, "")), seed)
        for n, task in cells
    }


def _by_processes(
    make: Callable[[Sequence[tuple[int, str]]], RulerPrompts], cells: Sequence[tuple[int, str]], n: int, bar: Any
) -> Iterator[tuple[tuple[int, str], list[dict[str, Any]]]]:
    """The prompts of all cells, made by n processes at once.

    lm-eval draws from Python's only random generator, so threads would share it. The processes are new ones, because a
    process with running threads must not be forked, and `multiprocessing` would import the user's script in each.
    """

    def run(share: Sequence[tuple[int, str]]) -> RulerPrompts:
        job = pickle.dumps((make, share))
        command = f"from {__name__} import _serve; _serve()"
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TOKENIZERS_PARALLELISM": "false"}
        done = subprocess.run([sys.executable, "-c", command], input=job, capture_output=True, env=environment)
        if done.returncode:
            raise RuntimeError(f"a process that makes RULER's prompts failed: {done.stderr.decode()[-2000:]}")
        prompts = pickle.loads(done.stdout)
        if isinstance(prompts, Exception):
            raise prompts
        bar.update(len(share))
        made: RulerPrompts = prompts
        return made

    with ThreadPoolExecutor(n) as pool:
        for prompts in pool.map(run, [cells[k::n] for k in range(n)]):
            yield from prompts.items()


def _serve() -> None:
    """What each process does: a job of `_by_processes` comes from standard input, its prompts go to standard output."""
    make, cells = pickle.load(sys.stdin.buffer)
    result: Any
    with redirect_stdout(sys.stderr):
        try:
            result = make(cells)
        except Exception as error:  # noqa: BLE001 - raised again where the job came from
            result = error
    sys.stdout.buffer.write(pickle.dumps(result))


def chosen_tasks(tasks: Sequence[str] | None, **data: Any) -> list[str]:
    """Names of the tasks that are measured; `data` are haystack, squad and hotpotqa, as in `ruler_prompts`."""
    chosen = [t for t in TASKS if t not in _NEEDS or data[_NEEDS[t]] is not None] if tasks is None else list(tasks)
    for task in chosen:
        if task not in TASKS:
            raise ValueError(f"unknown RULER task {task!r}. Known: {', '.join(TASKS)}.")
        if task in _NEEDS and data[_NEEDS[task]] is None:
            raise ValueError(f"RULER's {task} needs {_NEEDS[task]}: give it, or leave the task out.")
        if task in _QA:
            _QA[task](Path(data[_NEEDS[task]]))  # raises for a file of another form
    return chosen


def require_haystack(
    tokenizer: PreTrainedTokenizerBase, lengths: Sequence[int], tasks: Sequence[str] | None, haystack: str | None
) -> None:
    """Raise ValueError if the text ends before the longest prompt: lm-eval would make a shorter one in its place."""
    length = max(lengths, default=0)
    task = next((task for task in tasks or TASKS if _NEEDS.get(task) == "haystack"), None)
    if task is None or haystack is None:
        return
    n = _tokens(tokenizer, _words(haystack), length)
    if n < 0.9 * length:
        raise ValueError(
            f"the text has {n} tokens, which are too few for RULER's {task} at {length} tokens: give more text, or "
            "leave the length out."
        )


def _warn_of_short_files(tokenizer: PreTrainedTokenizerBase, length: int, files: dict[str, Path]) -> None:
    """Tell of a QA task whose paragraphs end before the longest prompt: its prompts are shorter then."""
    for task, file in files.items():
        n = _tokens(tokenizer, _QA[task](file)[1], length)
        if n < 0.8 * length:
            warnings.warn(
                f"RULER's {task} has prompts of some {n} tokens at {length} tokens, as {file.name} has no more text.",
                stacklevel=3,
            )


def _tokens(tokenizer: PreTrainedTokenizerBase, parts: Sequence[str], enough: int) -> int:
    """Tokens of the parts together, which are not counted where the parts are as many as `enough`."""
    if len(parts) >= enough:  # each has a token or more
        return len(parts)
    return len(tokenizer(" ".join(parts))["input_ids"])


def _words(haystack: str) -> list[str]:
    return re.sub(r"\s+", " ", haystack).split(" ")


def _documents(
    task: str,
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    frame: int,
    samples: int,
    source: str | Path | None,
    seed: int,
) -> list[dict[str, Any]]:
    """lm-eval's documents of one task and length, made from `source`; `frame` tokens stand around each prompt."""
    room = length - frame
    count = _Search(tokenizer, room)
    with _generators(task, length, seed, count) as lm_eval:
        if task in _NEEDLES:
            kind = _NEEDLES[task]["type_haystack"]
            essay = _words(str(source))
            return lm_eval.prepare_niah.generate_samples(
                essay if kind == "essay" else lm_eval.prepare_niah.get_haystack(kind),
                max_seq_length=room,
                template=lm_eval.niah_utils.TEMPLATE,
                num_samples=samples,
                TOKENIZER=count,
                **_NEEDLES[task],
            )
        if task == "ruler_vt":
            make = lm_eval.vt_utils.sys_vartrack_w_noise_random
            # 5 times the noise, 1 chain of 4 hops, as an example; 30 tokens of answer
            _require_room(task, tokenizer, _VT_EXAMPLE, lm_eval.vt_utils, (5, 1, 4, True), 30)
            (example,) = make(tokenizer=tokenizer, num_samples=1, max_seq_length=_VT_EXAMPLE, incremental=5)
            shown = f"{example['input']} {' '.join(example['outputs'])}\n\n"
            _require_room(task, tokenizer, length, lm_eval.vt_utils, (10, 1, 4), 30 + frame, shown)
            count.searching = True  # the example's is over
            return make(tokenizer=count, num_samples=samples, max_seq_length=room, icl_example=example)
        if task == "ruler_cwe":
            # 10 words; 120 tokens of answer
            _require_room(task, tokenizer, length, lm_eval.cwe_utils, (10, room), 120 + frame)
            return lm_eval.cwe_utils.sys_word_pair_random(num_samples=samples, max_seq_length=room, tokenizer=count)
        if task == "ruler_fwe":
            empty = lm_eval.fwe_utils.TEMPLATE.format(context="", query="")
            _require_tokens(task, length, frame + max(_FWE_SHORTEST, len(tokenizer(empty)["input_ids"])))
            return lm_eval.fwe_utils.sys_kwext(tokenizer=tokenizer, max_seq_length=room, num_samples=samples)
        qas, docs = _QA[task](Path(source or ""))
        return lm_eval.qa_utils.generate_samples(
            tokenizer=tokenizer, docs=docs, qas=qas, max_seq_length=room, num_samples=min(samples, len(qas))
        )


class _Search:
    """A tokenizer for lm-eval's generators, which look for the longest prompt that fits by prompts that grow by little.

    Tokens of a prompt that is far from fitting are only estimated, from the share of tokens to characters of one at
    least half as long. Otherwise most of the time that prompts take would be spent on those that are thrown away.

    Args:
        tokenizer: of the model.
        length: most tokens of a prompt with its answer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, length: int) -> None:
        self.tokenizer, self.length = tokenizer, length
        self.searching = True
        self.characters = self.tokens = 0  # of the prompt that was tokenized last

    def __call__(self, text: str) -> Any:
        if self.searching and len(text) < 2 * self.characters:
            estimate = self.tokens * len(text) // self.characters
            if estimate < 0.8 * self.length:
                return SimpleNamespace(input_ids=range(estimate))
        encoded = self.tokenizer(text)
        self.characters, self.tokens = len(text), len(encoded["input_ids"])
        return encoded

    def samples(self, items: Iterable[int], **_: Any) -> Iterable[int]:
        """In place of the bar over samples, which comes after the search."""
        self.searching = False
        return items


@contextmanager
def _generators(task: str, length: int, seed: int, count: _Search) -> Iterator[Any]:
    """lm-eval's generator modules, repeatable and offline inside the block, without their progress bars.

    Sentences are split by punctuation: NLTK's splitter needs a download, and the places of needles do not need a better
    one. Prompts that do not fit in `length` raise ValueError.
    """
    with quiet_import():
        from lm_eval.tasks.ruler import cwe_utils, fwe_utils, niah_utils, prepare_niah, qa_utils, vt_utils
    modules: dict[str, Any] = {
        m.__name__.rpartition(".")[2]: m for m in (cwe_utils, fwe_utils, niah_utils, prepare_niah, qa_utils, vt_utils)
    }
    split = lru_cache(maxsize=4)(lambda text: re.split(r"(?<=[.!?])\s+", text))
    replaced: list[Any] = [(m, "tqdm", count.samples) for m in modules.values() if hasattr(m, "tqdm")]
    replaced.append((prepare_niah, "cached_sent_tokenize", split))
    before = [getattr(m, name) for m, name, _ in replaced]
    states = random.getstate(), cwe_utils.RNG.getstate(), np.random.get_state()
    for m, name, value in replaced:
        setattr(m, name, value)
    random.seed(_SEED + seed)
    cwe_utils.RNG.seed(_SEED + seed)
    np.random.seed(_SEED + seed)  # variable tracking's values
    try:
        with redirect_stdout(StringIO()):  # one of them prints its search for a length
            yield SimpleNamespace(**modules)
    except ValueError as error:
        if not str(error).startswith("Could not generate"):
            raise
        # lm-eval's error names arguments that users of `ruler_prompts` do not have
        raise ValueError(
            f"{length} tokens are too few for RULER's {task} with its answer: use a longer length, such as "
            f"{SHORTEST_LENGTH}, RULER's shortest, or leave the task out."
        ) from error
    finally:
        random.setstate(states[0])
        cwe_utils.RNG.setstate(states[1])
        np.random.set_state(states[2])
        for (m, name, _), value in zip(replaced, before, strict=True):
            setattr(m, name, value)


def _require_room(
    task: str,
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    generator: Any,
    least: tuple[int, ...],
    more: int,
    shown: str = "",
) -> None:
    """Raise ValueError unless a generator's shortest prompt fits; otherwise lm-eval would search forever.

    `least` are the arguments of its shortest prompt, `more` the tokens of the answer and around the prompt, and `shown`
    is an example before the prompt.
    """
    rng = getattr(generator, "RNG", random)
    states = random.getstate(), rng.getstate()
    parts = generator.generate_input_output(*least)
    rng.setstate(states[1])
    random.setstate(states[0])  # so that lm-eval's own first draw is the same
    prompt = "\n".join([*parts[:-1], " ".join(map(str, parts[-1]))])
    _require_tokens(task, length, more + sum(len(tokenizer(text)["input_ids"]) for text in (prompt, shown) if text))


def _require_tokens(task: str, length: int, needed: int) -> None:
    if needed > length:
        raise ValueError(
            f"{length} tokens are too few for RULER's {task}, which takes {needed} with its answer: use a longer "
            "length, or leave the task out."
        )


def _squad(file: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Questions and paragraphs for lm-eval's generator, from SQuAD's JSON file or from JSON lines."""
    paragraphs = read_squad(file)
    docs = sorted({p.text for p in paragraphs})
    index = {text: i for i, text in enumerate(docs)}
    by_title: dict[str, list[int]] = {}
    for p in paragraphs:
        by_title.setdefault(p.title, []).append(index[p.text])
    questions = []
    for p in paragraphs:
        more = [i for i in by_title[p.title] if i != index[p.text]]
        for question, answers in p.questions:
            questions.append({"query": question, "outputs": answers, "context": [index[p.text]], "more_context": more})
    if not questions:
        raise ValueError(f"{file} has no question with an answer.")
    return questions, docs


def _hotpotqa(file: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Questions and paragraphs for lm-eval's generator, from HotpotQA's JSON file or from JSON lines."""

    def texts(item: dict[str, Any]) -> list[str]:
        return [f"{title}\n{''.join(sentences)}" for title, sentences in item["context"]]

    with readable(file, "HotpotQA's own JSON file, or JSON lines with question, answer and context"):
        items: list[Any] = (
            list(read_json_lines(file)) if is_json_lines(file) else read_json(file.read_text(encoding="utf-8"))
        )
        docs = sorted({text for item in items for text in texts(item)})
        index = {text: i for i, text in enumerate(docs)}
        questions = [
            {"query": i["question"], "outputs": [i["answer"]], "context": [index[t] for t in texts(i)]} for i in items
        ]
    if not questions:
        raise ValueError(f"{file} has no questions.")
    return questions, docs


_QA = {"ruler_qa_squad": _squad, "ruler_qa_hotpot": _hotpotqa}
