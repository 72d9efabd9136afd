"""Time of retrieval answers at length: the model's own `generate` in chunks beside `greedy_answers`, in one run.

Run:   python benchmarks/eval_speed.py [--shapes smollm2-135m llama-3-8b] [--models 3] [--out FILE.jsonl]
       python benchmarks/eval_speed.py --quick        two kinds at 8192 tokens, a minute on a GPU
Shape: random weights in bf16, SDPA; every answer has all the tokens that it may have, as no token ends it.

What is timed, each a JSON line as soon as it is there:
  together  all kinds at one length by `retrieval`, as `rope-patch eval` asks them: what prompts share is read once. The
          lines of --models models add up to the line `total`.
  new     with --by-kind all prompts of one kind (ten depths, --trials prompts each) by `greedy_answers`, of the first
          model: seconds in all, for reading prompts and for decoding, prompts' tokens a second, peak memory.
  old     --old-prompts of them in one batch by `generate` with prefill_chunk_size 8192 over the batch, as rope-patch
          did before, and the same ones by `greedy_answers`: `ratio` is old over new seconds. `replies_that_differ`
          counts replies that are not the same; in bf16 the order of sums decides near ties, so some may.
  kernel  attention alone at the shape, in milliseconds a layer: all of a prompt by each SDPA kernel that takes it, the
          last half of it behind the first, and one token of each of 20 rows by `decode_attention` and by SDPA with a
          mask: `ratio` is the milliseconds of the latter over those of the line.
"""

import argparse
import json
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from view_overhead import LLAMA3_8B, SMOLLM2_135M, synchronize

from rope_kernels import decode_attention, decode_attention_ref
from rope_patch.base.environment import device_name, installed_versions
from rope_patch.eval.measures.prompt_grid import DEPTHS, retrieval_prompts
from rope_patch.eval.measures.retrieval import retrieval
from rope_patch.generation import generation
from rope_patch.generation.generation import greedy_answers
from rope_patch.generation.reading import Reader
from rope_patch.prompts.needles import KINDS, Kind, reply_tokens
from rope_patch.prompts.wordings import PASSKEY_FILLER

T = TypeVar("T")
GIB = 1 << 30
NEW_TOKENS = {kind: reply_tokens(kind, 4) for kind in KINDS}
TINY = {**SMOLLM2_135M, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 6}
SHAPES = {"smollm2-135m": SMOLLM2_135M, "llama-3-8b": LLAMA3_8B, "tiny": TINY}
SEPARATOR = "<|endoftext|>"
LENGTHS = {"smollm2-135m": 65536, "llama-3-8b": 131072, "tiny": 1024}
# of the larger shape one prompt by the old way takes as long as all of the smaller one's
OLD_PROMPTS = {"smollm2-135m": 4, "llama-3-8b": 1, "tiny": 4}
PARTS = {"_read": "read_seconds", "_decode": "decode_seconds"}


def build(shape: str, layers: int | None, seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    fields = {**SHAPES[shape], **({} if layers is None else {"num_hidden_layers": layers})}
    config = LlamaConfig(**{**fields, "max_position_embeddings": 131072, "eos_token_id": None, "bos_token_id": None})
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
        model = LlamaForCausalLM._from_config(config, attn_implementation="sdpa", dtype=dtype).eval()
    model.generation_config = GenerationConfig()
    return model


def language() -> tuple[PreTrainedTokenizerFast, Callable[[int], str]]:
    """A tokenizer, and running text of at least so many tokens: words that nobody knows, in sentences."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9))) for _ in range(3000)]

    def sentences(n: int) -> str:
        return " ".join(" ".join(draw.choices(words, k=draw.randint(5, 20))).capitalize() + "." for _ in range(n))

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=8192,
        special_tokens=[SEPARATOR],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([sentences(3000), PASSKEY_FILLER, "0123456789"], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token=SEPARATOR, eos_token=SEPARATOR)

    def haystack(n: int) -> str:
        text = ""
        while len(tokenizer(text, add_special_tokens=False)["input_ids"]) < n:
            text += sentences(1000) + " "
        return text

    return tokenizer, haystack


@torch.no_grad()
def old_answers(model: Any, tokenizer: Any, prompts: list[list[int]], max_new_tokens: int) -> list[str]:
    """One batch by `generate` with a dynamic cache, its prompts read in chunks."""
    ids = torch.tensor(prompts, device=model.device)
    chunk = max(generation.PREFILL_CHUNK // len(prompts), 1)
    config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=False,
        prefill_chunk_size=chunk if ids.shape[1] > chunk else None,
        pad_token_id=tokenizer.pad_token_id,
    )
    out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config)
    return tokenizer.batch_decode(out[:, ids.shape[1] :], skip_special_tokens=True)


def together(model: Any, tokenizer: Any, text: str, length: int, kinds: list[Kind], trials: int) -> dict[str, Any]:
    """Seconds, by part, and memory of all kinds at one length, as `rope-patch eval` asks them."""
    with timed_parts() as parts:
        grids, facts = measured(
            partial(retrieval, model, tokenizer, text, [length], kinds=kinds, trials=trials, progress=False)
        )
    return {"prompts": len(grids) * len(DEPTHS) * trials, **facts, **parts}


@contextmanager
def timed_parts() -> Iterator[dict[str, float]]:
    """Seconds that the parts of `Reader` take; waiting for the GPU between them costs nothing that counts."""
    seconds = dict.fromkeys(PARTS.values(), 0.0)
    before = {name: getattr(Reader, name) for name in PARTS}  # the methods, put back at the end

    def timed(name: str) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            synchronize()
            begin = time.perf_counter()
            out = before[name](*args)
            synchronize()
            seconds[PARTS[name]] += time.perf_counter() - begin
            return out

        return run

    for name in PARTS:
        setattr(Reader, name, timed(name))
    try:
        yield seconds
    finally:
        for name, method in before.items():
            setattr(Reader, name, method)


def measured(run: Callable[[], T]) -> tuple[T, dict[str, float]]:
    """What `run` returns, its seconds and its peak of memory."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    synchronize()
    begin = time.perf_counter()
    replies = run()
    synchronize()
    facts = {"seconds": time.perf_counter() - begin}
    if torch.cuda.is_available():
        facts["peak_gib"] = torch.cuda.max_memory_allocated() / GIB
    return replies, facts


def milliseconds(run: Callable[[], object], repeats: int = 3) -> float:
    run()
    synchronize()
    begin = time.perf_counter()
    for _ in range(repeats):
        run()
    synchronize()
    return 1000 * (time.perf_counter() - begin) / repeats


def kernels(model: Any, length: int) -> Iterator[dict[str, Any]]:
    """Attention alone, at the shape of the model."""
    c = model.config
    dim = c.hidden_size // c.num_attention_heads
    options = {"device": model.device, "dtype": model.dtype}
    q = torch.randn(1, c.num_attention_heads, length, dim, **options)  # [batch, n_heads, n, head_dim]
    k, v = (torch.randn(1, c.num_key_value_heads, length, dim, **options) for _ in range(2))
    grouped = q.shape[1] != k.shape[1]
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, None):
        name = "the default" if backend is None else backend.name
        try:
            with sdpa_kernel(backend) if backend is not None else contextmanager(lambda: iter([None]))():
                ms = milliseconds(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped))
        except RuntimeError as error:
            yield {"attention": f"whole prompt, {name}", "error": str(error)[:200]}
            continue
        flops = 2 * length**2 * q.shape[1] * dim  # half of the square is seen
        yield {"attention": f"whole prompt, {name}", "ms": ms, "tflops": flops / ms / 1e9}
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        first, again = new_shapes(q, k, v, backend)
        yield {"attention": f"new lengths of some 4096 tokens, {backend.name}", "first_ms": first, "again_ms": again}
    half = length // 2
    bias: Any = causal_lower_right(length - half, length)
    ms = milliseconds(lambda: F.scaled_dot_product_attention(q[:, :, half:], k, v, attn_mask=bias, enable_gqa=grouped))
    yield {"attention": "last half behind the first", "ms": ms}
    rows = max(min(20, int(4 * GIB // (k.nbytes + v.nbytes))), 1)  # keys and values of at most 4 GiB
    q, k, v = q[:, :, 0].repeat(rows, 1, 1), k.repeat(rows, 1, 1, 1), v.repeat(rows, 1, 1, 1)
    # each row sees keys 0 to length - 1
    end = torch.full((rows,), length, device=model.device)
    ways = {"kernel": decode_attention, "masked SDPA": decode_attention_ref}
    times = {
        name: milliseconds(lambda run=run: run(q, k, v, torch.zeros_like(end), end), 10) for name, run in ways.items()
    }
    for name, ms in times.items():
        rate = {"tb_per_s": (k.nbytes + v.nbytes) / ms / 1e9, "ratio": times["masked SDPA"] / ms}
        yield {"attention": f"one token of {rows} rows, {name}", "ms": ms, **rate}


def new_shapes(q: Any, k: Any, v: Any, backend: SDPBackend) -> tuple[float, float]:
    """Milliseconds of attention of a length that no call had before, and of the same length again; means of eight."""
    parts = [[x[:, :, :n] for x in (q, k, v)] for n in range(4001, 4129, 16)]  # eight lengths
    times = []
    with sdpa_kernel(backend):
        for _ in range(2):
            synchronize()
            begin = time.perf_counter()
            for part in parts:
                F.scaled_dot_product_attention(*part, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
            synchronize()
            times.append(1000 * (time.perf_counter() - begin) / len(parts))
    return times[0], times[1]


def setting() -> dict[str, Any]:
    """The first line: what the others were measured on."""
    gpu = device_name(torch.cuda.is_available())
    return {"line": "setting", "gpu": gpu, "versions": installed_versions("torch", "triton", "transformers", "trl")}


def tell_line(line: dict[str, Any], out: Path | None) -> None:
    """Print a line, and add it to a file if there is one."""
    print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in line.items()}), flush=True)
    if out:
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["smollm2-135m", "llama-3-8b"])
    parser.add_argument("--length", type=int, help="default: 65536 for smollm2-135m, 131072 for llama-3-8b")
    parser.add_argument("--layers", type=int, help="default: those of the shape")
    parser.add_argument("--models", type=int, default=3, help="of smollm2-135m; of llama-3-8b it is one")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--by-kind", action="store_true", help="time each kind alone besides")
    parser.add_argument("--trials", type=int, default=2, help="prompts of each depth; of llama-3-8b it is one")
    parser.add_argument("--old-prompts", type=int, help="0 leaves out the old way; default: 4, one of llama-3-8b")
    parser.add_argument("--quick", action="store_true", help="two kinds at 8192 tokens; 4 layers of llama-3-8b")
    parser.add_argument("--out", type=Path, help="file that gets the JSON lines as well")
    args = parser.parse_args()
    if args.quick:
        args.kinds, args.models, args.length = ["passkey", "multikey"], 1, args.length or 8192
    tell = partial(tell_line, out=args.out)
    tell(setting())
    tokenizer, haystack_of = language()
    for shape in args.shapes:
        length = args.length or LENGTHS[shape]
        large = shape == "llama-3-8b"
        layers = 4 if args.quick and large else args.layers
        text = haystack_of(length)
        kinds = args.kinds[:2] if large else args.kinds
        trials = 1 if large else args.trials
        about = {"shape": shape, "layers": layers, "length": length}
        total, n_models = 0.0, 1 if large else args.models
        for seed in reversed(range(n_models)):  # the first model stays for what follows
            model = build(shape, layers, seed)
            # the first call of all kernels, and the check of the model, are not of a kind
            greedy_answers(model, tokenizer, [list(range(1000)), list(range(900))], max_new_tokens=6)
            facts = together(model, tokenizer, text, length, kinds, trials)
            total += facts["seconds"]
            tell({"line": "together", **about, "model": seed, "kinds": kinds, **facts})
        tell({"line": "total", **about, "models": n_models, "kinds": kinds, "seconds": total})
        prompts = {
            kind: [p.ids for p in retrieval_prompts(kind, tokenizer, text, length, trials=trials)] for kind in kinds
        }
        for kind in kinds if args.by_kind else ():
            of_kind, n_new = prompts[kind], NEW_TOKENS[kind]
            with timed_parts() as parts:
                _, facts = measured(
                    lambda m=model, p=of_kind, n=n_new: greedy_answers(m, tokenizer, p, max_new_tokens=n)
                )
            rate = {"prompt_tokens_per_second": sum(map(len, of_kind)) / facts["seconds"]}
            tell({"line": "new", **about, "kind": kind, "prompts": len(of_kind), **facts, **parts, **rate})
        if torch.cuda.is_available():
            for line in kernels(model, length):
                tell({"line": "kernel", **about, **line})
        n_old = OLD_PROMPTS[shape] if args.old_prompts is None else args.old_prompts
        if n_old:
            kind = kinds[-1]
            few = prompts[kind][:: max(len(prompts[kind]) // n_old, 1)][:n_old]
            old, old_facts = measured(lambda m=model, p=few, k=kind: old_answers(m, tokenizer, p, NEW_TOKENS[k]))
            new, facts = measured(
                lambda m=model, p=few, k=kind: greedy_answers(m, tokenizer, p, max_new_tokens=NEW_TOKENS[k])
            )
            tell(
                {
                    "line": "old", **about, "kind": kind, "prompts": len(few),
                    **{f"old_{name}": value for name, value in old_facts.items()},
                    **{f"new_{name}": value for name, value in facts.items()},
                    "ratio": old_facts["seconds"] / facts["seconds"],
                    "replies_that_differ": sum(a != b for a, b in zip(old, new, strict=True)),
                }
            )  # fmt: skip
        del model


if __name__ == "__main__":
    main()
