"""What vLLM's own engine makes of rows on a CPU. Run by `programs.run`: vllm_logits.py FOLDER JOBS.json"""

import json
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

# the engine in this process, in PyTorch's own kernels, one thread
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",
}

import numpy as np  # noqa: E402
import torch  # noqa: E402
from reduced import CHUNK, save  # noqa: E402
from vllm import LLM, RequestOutput, SamplingParams  # noqa: E402
from vllm.inputs import TokensPrompt  # noqa: E402


def logits(engine: LLM, vocabulary: int, ids: np.ndarray) -> Iterator[np.ndarray]:
    """Of a row, as the engine computes them to tell the probabilities of a prompt's tokens."""
    said: list[np.ndarray] = []

    def listen(model: torch.nn.Module) -> None:
        compute = type(model).compute_logits

        def computed(hidden: torch.Tensor) -> torch.Tensor:
            logits = compute(model, hidden)
            said.append(logits[:, :vocabulary].float().numpy())
            return logits

        model.compute_logits = computed

    engine.apply_model(listen)
    _generate(engine, [ids.tolist()], max_tokens=1, prompt_logprobs=0)
    # of each part of the row first the place that a next token would be drawn from, then those before a token
    yield from said[1::2]
    yield said[-2]


def write(engine: LLM, text: np.ndarray, questions: list[list[int]], tokens: int) -> list[list[int]]:
    """The likeliest tokens behind the text and each question, of whose text the engine has kept the keys and values."""
    prompts = [[*text.tolist(), *question] for question in questions]
    return [output.outputs[0].token_ids for output in _generate(engine, prompts, max_tokens=tokens, ignore_eos=True)]


def _generate(engine: LLM, prompts: list[list[int]], **sampling: Any) -> list[RequestOutput]:
    greedily = SamplingParams(temperature=0, detokenize=False, **sampling)
    return engine.generate([TokensPrompt(prompt_token_ids=ids) for ids in prompts], greedily, use_tqdm=False)


if __name__ == "__main__":
    for job in json.loads(Path(sys.argv[2]).read_text()):
        try:
            length = max(job["rows"].values())
            engine = LLM(
                job["checkpoint"],
                dtype="float32",
                enforce_eager=True,
                max_model_len=length + 1,
                max_num_seqs=1,
                max_num_batched_tokens=CHUNK,
                enable_prefix_caching=True,
                skip_tokenizer_init=True,
            )
            save(job, partial(logits, engine, job["vocabulary"]), partial(write, engine))
        except Exception as error:  # of any kind: it is the outcome
            Path(job["out"]).with_suffix(".error").write_text(f"{type(error).__name__}: {error}")
