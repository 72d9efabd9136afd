"""A model under YaRN through vLLM on one GPU: passkeys as written and the loss of each token, beside Transformers.

Run: python research/experiments/served_vllm.py MODEL --text BOOKS.jsonl.xz --out FILE.json
         [--length 32768] [--factor 8] [--prompts 16] [--dtypes bfloat16 float32] [--eager]

The model is rescaled in memory and answers first, in float32 and in each of --dtypes; then `rope_patch.export` writes
it for vLLM, whose engine loads the folder. What is compared:
  loss      of each token of a held-out book with passkeys in it (served_row.py), --length tokens
  passkeys  prompts of `rope_patch.eval`, --length tokens, depths and wordings in turn, up to ten tokens written
The file is written again after each engine, so that a run that is cut off leaves what it has.
"""

import argparse
import gc
import json
import os
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rope_patch import export, patch_model
from rope_patch.base.environment import device_name, installed_versions
from rope_patch.eval import read_texts
from rope_patch.generation.generation import greedy_answers
from rope_patch.prompts.needles import RetrievalPrompt, make_prompt
from rope_patch.prompts.wordings import PASSKEY_WORDINGS
from served_row import passkey_row

WRITTEN = 10  # tokens of an answer
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def passkey_prompts(tokenizer: Any, length: int, number: int) -> list[RetrievalPrompt]:
    """Prompts of `length` tokens, evenly over depths, the wordings in turn."""
    rng = random.Random(0)
    prompts = []
    for i in range(number):
        wording = i % len(PASSKEY_WORDINGS)
        filler = tokenizer(PASSKEY_WORDINGS[wording].filler, add_special_tokens=False)["input_ids"]
        haystack = (filler * (length // len(filler) + 1))[:length]
        prompts.append(
            make_prompt(
                "passkey",
                tokenizer,
                haystack,
                n_tokens=length,
                depth=(i + 0.5) / number,
                n_needles=1,
                rng=rng,
                wording=wording,
            )
        )
    return prompts


def right(prompts: Sequence[RetrievalPrompt], answers: Sequence[str]) -> int:
    """How many answers have the number that was asked for."""
    return sum(prompt.answers[0] in answer for prompt, answer in zip(prompts, answers, strict=True))


@torch.no_grad()
def of_transformers(model: Any, tokenizer: Any, ids: list[int], prompts: Sequence[RetrievalPrompt]) -> dict[str, Any]:
    """Loss of each token of a row but the first, and what is written to the prompts."""
    hidden = model.model(torch.tensor([ids], device=DEVICE), use_cache=False).last_hidden_state[0]
    targets = torch.tensor(ids[1:], device=DEVICE)
    loss = [
        torch.nn.functional.cross_entropy(model.lm_head(part).float(), target, reduction="none")
        for part, target in zip(hidden[:-1].split(4096), targets.split(4096), strict=True)
    ]
    replies = greedy_answers(model, tokenizer, [prompt.ids for prompt in prompts], max_new_tokens=WRITTEN)
    return {"loss": torch.cat(loss).cpu().numpy(), "answers": list(replies)}


def of_vllm(engine: Any, tokenizer: Any, ids: list[int], prompts: Sequence[RetrievalPrompt]) -> dict[str, Any]:
    """The same by vLLM."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    graded = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    said = engine.generate(TokensPrompt(prompt_token_ids=ids), graded, use_tqdm=False)[0].prompt_logprobs
    loss = np.array([-said[i][token].logprob for i, token in enumerate(ids) if i])
    written = SamplingParams(temperature=0, max_tokens=WRITTEN, detokenize=False)
    outputs = engine.generate([TokensPrompt(prompt_token_ids=p.ids) for p in prompts], written, use_tqdm=False)
    return {
        "loss": loss,
        "answers": [tokenizer.decode(output.outputs[0].token_ids, skip_special_tokens=True) for output in outputs],
    }


def figures(
    said: dict[str, Any], exact: dict[str, Any], prompts: Sequence[RetrievalPrompt], window: int
) -> dict[str, Any]:
    """Losses within and beyond the window, how far each token's is from `exact`, and passkeys."""
    differences = np.abs(said["loss"] - exact["loss"])
    return {
        "loss_within": float(said["loss"][: window - 1].mean()),
        "loss_beyond": float(said["loss"][window - 1 :].mean()) if len(said["loss"]) >= window else None,
        "largest_difference": float(differences.max()),
        "mean_difference": float(differences.mean()),
        "passkeys": right(prompts, said["answers"]),
        "same_answers": sum(a == b for a, b in zip(said["answers"], exact["answers"], strict=True)),
        "answers": said["answers"],
    }


def main() -> None:
    """Write the file, once for each engine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of the checkpoint")
    parser.add_argument("--text", required=True, type=Path, help="held-out books; the first one is read")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--length", type=int, default=32768, help="tokens of the row and of each prompt")
    parser.add_argument("--factor", type=float, default=8.0)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"], choices=["bfloat16", "float32"])
    parser.add_argument("--eager", action="store_true", help="vLLM without torch.compile and CUDA graphs")
    args = parser.parse_args()
    began = time.perf_counter()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    book = tokenizer(next(read_texts([args.text]))[: 8 * args.length], add_special_tokens=False)["input_ids"]
    ids = passkey_row(tokenizer, book, args.length).ids
    prompts = passkey_prompts(tokenizer, args.length, args.prompts)
    lines: list[dict[str, Any]] = []
    result = {
        "gpu": device_name(DEVICE == "cuda"),
        "versions": installed_versions("torch", "triton", "transformers", "vllm"),
        "length": args.length,
        "prompts": args.prompts,
        "rescaling": f"yarn, factor {args.factor:g}",
        "lines": lines,
    }

    def tell(program: str, dtype: str, told: dict[str, Any]) -> None:
        lines.append({"program": program, "dtype": dtype, "at_seconds": round(time.perf_counter() - began, 1), **told})
        args.out.write_text(json.dumps(result, indent=1) + "\n")
        print(json.dumps({k: v for k, v in lines[-1].items() if k != "answers"}), flush=True)

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "served"
        exact: dict[str, Any] = {}
        window = 0
        for dtype in dict.fromkeys(["float32", *args.dtypes]):
            model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, dtype)).to(DEVICE).eval()
            window = model.config.max_position_embeddings
            patch_model(model, "yarn", factor=args.factor)
            said = of_transformers(model, tokenizer, ids, prompts)
            exact = exact or said
            tell("Transformers", dtype, figures(said, exact, prompts, window))
            if dtype == args.dtypes[0]:
                exported = export(model, folder, target="vllm")
                result["command"] = exported.command.replace(str(folder), "MODEL")
                result["export_difference"] = exported.difference
            del model
            gc.collect()
            torch.cuda.empty_cache()
        for dtype in args.dtypes:
            try:
                tell(
                    "vLLM",
                    dtype,
                    figures(_of_engine(folder, dtype, args, ids, tokenizer, prompts), exact, prompts, window),
                )
            except Exception as error:  # of any kind: it is the outcome, and another dtype may do
                tell("vLLM", dtype, {"error": f"{type(error).__name__}: {error}"[:2000]})


def _of_engine(
    folder: Path, dtype: str, args: Any, ids: list[int], tokenizer: Any, prompts: Sequence[RetrievalPrompt]
) -> dict[str, Any]:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # one process, which ends with its errors
    from vllm import LLM

    engine = LLM(
        str(folder),
        dtype=dtype,
        max_model_len=args.length + WRITTEN,
        max_num_batched_tokens=8192,
        gpu_memory_utilization=0.3,
        enforce_eager=args.eager,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
    )
    try:
        return of_vllm(engine, tokenizer, ids, prompts)
    finally:
        del engine
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
