"""Logits of vLLM's own engine on a CPU. Run by `programs.run`: vllm_logits.py FOLDER JOBS.json"""

import json
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

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
from vllm import LLM, SamplingParams  # noqa: E402
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
    sampling = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    engine.generate(TokensPrompt(prompt_token_ids=ids.tolist()), sampling, use_tqdm=False)
    # of each part of the row first the place that a next token would be drawn from, then those before a token
    yield from said[1::2]
    yield said[-2]


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
                enable_prefix_caching=False,
                skip_tokenizer_init=True,
            )
            save(job, partial(logits, engine, job["vocabulary"]))
        except Exception as error:  # of any kind: it is the outcome
            Path(job["out"]).with_suffix(".error").write_text(f"{type(error).__name__}: {error}")
