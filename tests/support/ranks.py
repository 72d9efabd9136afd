"""The trainer on several ranks against one: a script for torchrun, and what starts it and reads its results.

On a CPU ranks communicate by gloo, on GPUs by NCCL. A case is options of `support.training.trainer` that JSON can
hold, and "adapters", options of LoRA; "documents" and "evaluated", of the datasets, with "repeated", how many of the
first follow the last; "model", options of the tiny model, or the folder of one; "quantized", options of bitsandbytes
for weights in 4 bits; "micro_batches", in an optimizer step, of all ranks; "resume", a checkpoint; "saves", whether the
model is saved at the end; "in_parts", whether engines that shard weights also save them so.
"""

import faulthandler
import json
import os
import subprocess
import sys
import threading
import time
import traceback
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from .launched import ABORTED, run_ranks_once

ROOT = Path(__file__).parents[2]
PI = {"rescale": "pi", "rescale_args": {"factor": 4.0}}
SELF = {"objective": "self-distill", "view": "skip"}
RELATION = {"objective": "relation-distill", **PI}
ADAPTERS = {"r": 4, "target_modules": ["q_proj", "k_proj", "v_proj"]}
LOGGED = ("loss", "ce", "kl", "relation/", "hidden/", "view/", "grad_norm", "num_tokens", "weighted_ce", "view_ce")

# seconds after which a case prints its stack and ends its rank, and torchrun the others; a GPU's first case compiles
_HANGS = {"cpu": 900, "cuda": 150}

# a process has one generator of random weights, and its threads prepare engines at once
_DRAWS = threading.Lock()

Runs = dict[str, dict[str, Any]]
"""Name -> {"steps": entries of the log, "evaluated": metrics, "weights": name -> tensor on the CPU, "moved": how far
each has gone}, or {"failed": what it printed}."""


def run_on_ranks(
    folder: Path,
    cases: dict[str, dict[str, Any]],
    world: int,
    engine: str = "ddp",
    shared: int = 1,
    device: str = "cpu",
    raises: bool = True,
    **common: Any,
) -> Runs:
    """Train each case on `world` ranks. One that fails alike on all ranks leaves the next ones to run.

    Args:
        folder: for files.
        cases: what to train, by name.
        world: ranks; 1 is a plain process.
        engine: "ddp", "fsdp2", "zero2" or "zero3".
        shared: ranks that share each sequence, by a ring under "fsdp2" and by Ulysses under ZeRO.
        device: "cpu" or "cuda".
        raises: whether a case that has failed raises AssertionError here, or is left to `require_alike`.
        **common: options of all cases.
    """
    out = folder / f"{engine}-{world}-{shared}"
    cases = {name: _with_saved_model({**common, **case}, folder) for name, case in cases.items()}
    results, printed = _start(out, cases, world, engine, shared, device)
    left = {name: case for name, case in cases.items() if name not in results}
    if printed is not None and left and device == "cpu" and world > 1 and ABORTED in printed:
        warnings.warn(
            f"SIGABRT ended a rank in {next(iter(left))!r}; it and the rest run again:\n{printed}", stacklevel=2
        )
        rest, printed = _start(out.with_name(f"{out.name}-again"), left, world, engine, shared, device)
        results |= rest
    if printed is not None:  # the ranks were ended while they ran the first case without a result
        left = [name for name in left if name not in results]
        results |= {name: {"failed": f"it was not run, as {left[0]!r} ended its ranks"} for name in left}
        results |= {name: {"failed": printed} for name in left[:1]}
        assert left, printed
    if raises:
        failed = [f"{name}: {result['failed']}" for name, result in results.items() if "failed" in result]
        assert not failed, "\n".join(failed)
    return results


def _start(
    out: Path, cases: dict[str, dict[str, Any]], world: int, engine: str, shared: int, device: str
) -> tuple[Runs, str | None]:
    """The runs that ended, and what the job printed if it failed."""
    job = {"engine": engine, "shared": shared, "device": device, "cases": cases}
    out.with_suffix(".json").write_text(json.dumps(job))
    ours = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "tests")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*ours, os.environ.get("PYTHONPATH", "")]),
        # ninja, which builds DeepSpeed's kernels, is beside this Python, whether or not its environment is active
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "OMP_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",  # a rank that a signal ends prints its stack
    }
    if device == "cpu":
        environment |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    elif world == 1:
        environment["CUDA_VISIBLE_DEVICES"] = "0"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(world)]
    command = [sys.executable, *(launcher if world > 1 else []), "-m", "support.ranks", str(out)]
    printed = _run(command, environment, _HANGS[device] * len(cases) + 60, device)
    return torch.load(out.with_suffix(".pt")) if out.with_suffix(".pt").exists() else {}, printed


def _run(command: list[str], environment: dict[str, str], most_seconds: int, device: str) -> str | None:
    """Run a job; return what it printed if it failed, else None."""
    if device == "cpu":
        done = run_ranks_once(command, env=environment, timeout=most_seconds)
        return _last_lines(done.stderr) if done.returncode else None
    pipes: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=environment, text=True, **pipes) as job:
        try:
            _, stderr = job.communicate(timeout=most_seconds)
        except subprocess.TimeoutExpired:
            job.terminate()  # torchrun ends its ranks
            _, stderr = job.communicate(timeout=60)
    return _last_lines(stderr) if job.returncode else None


def _with_saved_model(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The case with a folder for its model, if weights are quantised, which happens as they are loaded."""
    if "quantized" not in case:
        return case
    from support.tiny import tiny

    with _DRAWS:
        model = tiny(**case.get("model", {}))
    model.save_pretrained(folder / "unquantized")
    return {**case, "model": str(folder / "unquantized")}


def _last_lines(stderr: str, most: int = 80) -> str:
    """The last lines of each rank, then those without one, as a signal leaves, and the cause that torchrun found."""
    before, _, report = stderr.partition("torch/distributed/elastic/")
    cause = report[report.rfind("Root Cause") :].splitlines() if "Root Cause" in report else []
    lines: dict[str, list[str]] = {}
    for line in before.splitlines():
        lines.setdefault(line.split(":")[0] if line.startswith("[rank") else "", []).append(line[:300])
    ends = ["\n".join(of_rank[-most:]) for _, of_rank in sorted(lines.items(), reverse=True)]
    return "\n".join([*ends, *cause])


def require_alike(
    alone: Runs, together: Runs, tolerance: float = 2e-5, weights: float = 1e-5, parts: float = 1.0, moved: float = 0.0
) -> None:
    """Fail where steps, evaluations or weights of several ranks are not those of one, and name all that differs.

    Args:
        alone: on one rank.
        together: on several.
        tolerance: of what is logged, relative, but for draws, which are the same; evaluations get fifty times as much,
            up to a tenth, of weights that have gone apart.
        weights: of each weight, against the largest of its tensor.
        parts: how many times `tolerance` all but the loss gets: parts of it are of few rows, and gradients have norms.
        moved: of each weight, against how far those of its tensor have gone, on top of `weights`.
    """
    assert alone.keys() == together.keys()
    failed = {}
    for name, expected in alone.items():
        actual = together[name]
        broken = [
            f"{who}: {run['failed']}"
            for who, run in (("one rank", expected), ("several ranks", actual))
            if "failed" in run
        ]
        gaps = broken or [
            *_gaps_of_run(expected, actual, tolerance, parts),
            *_gaps_of_weights(expected, actual, weights, moved),
        ]
        if gaps:
            left = [f"and {len(gaps) - 12} more"] if len(gaps) > 12 else []
            failed[name] = "\n    ".join([name, *gaps[:12], *left])
    assert not failed, f"{len(failed)} of {len(alone)} cases:\n" + "\n".join(failed.values())


def _gaps_of_run(expected: Any, actual: Any, tolerance: float, parts: float) -> list[str]:
    gaps = []
    if len(actual["steps"]) != len(expected["steps"]):
        gaps.append(f"{len(actual['steps'])} steps, and not {len(expected['steps'])}")
    for step, (ours, theirs) in enumerate(zip(actual["steps"], expected["steps"], strict=False)):
        gaps += _gaps(ours, theirs, tolerance, parts, f"step {step}")
    return gaps + _gaps(actual["evaluated"], expected["evaluated"], min(50 * tolerance, 0.1), 1.0, "evaluated")


def _gaps_of_weights(expected: Any, actual: Any, weights: float, moved: float) -> list[str]:
    gaps = []
    for key, weight in expected["weights"].items():
        gap, largest = (actual["weights"][key] - weight).abs().max(), weight.abs().max()
        allowed = weights * largest.clamp(min=1e-6) + moved * expected["moved"][key]
        if not gap < allowed:  # nor where it is not a number
            went = f"{expected['moved'][key]:.2g} and {actual['moved'][key]:.2g}"
            gaps.append(f"{key} differs by {gap:.2g}, allowed are {allowed:.2g}; it is {largest:.2g} and went {went}")
    return gaps


def _gaps(
    actual: dict[str, float], expected: dict[str, float], tolerance: float, parts: float, where: str
) -> list[str]:
    gaps = []
    for key, value in expected.items():
        is_drawn = key.startswith("view/") or key == "num_tokens"
        relative = 1e-6 if is_drawn else tolerance * (1.0 if key == "loss" else parts)
        if key not in actual:  # TRL's own loss has no parts, and ours may stand in for it: more than these may be there
            gaps.append(f"{where}: no {key}")
        elif not abs(actual[key] - value) <= relative * max(abs(value), 0.1):
            gaps.append(f"{where}: {key} is {actual[key]:.6g}, and not {value:.6g}; {relative:.2g} of it are allowed")
    return gaps


def _options(engine: str, world: int, shared: int, device: str, bf16: bool, in_parts: bool) -> dict[str, Any]:
    """Options of the trainer for an engine, in a process that may have had another trainer before."""
    from accelerate import PartialState
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType, ParallelismConfig
    from transformers import training_args

    if world == 1:
        return {"use_cpu": device == "cpu"}
    parallelism = {}
    if engine == "ddp":
        return {"use_cpu": device == "cpu", "ddp_find_unused_parameters": False}
    AcceleratorState._reset_state()
    if device == "cpu":
        # accelerate has FSDP and DeepSpeed for GPUs alone, unless it finds another state
        PartialState(cpu=True)
        kind = DistributedType.MULTI_GPU if engine == "fsdp2" else DistributedType.DEEPSPEED
        PartialState._shared_state["distributed_type"] = kind
        training_args.is_torch_bf16_gpu_available = lambda: True  # so has Transformers bf16
        parallelism["accelerator_config"] = {"use_configured_state": True}
        if engine != "fsdp2":
            import deepspeed

            deepspeed.init_distributed(dist_backend="gloo")
    if shared > 1:
        sizes = {"cp_size": shared} if engine == "fsdp2" else {"sp_size": shared}
        if engine == "fsdp2" and world > shared:
            sizes["dp_shard_size"] = world // shared
        if engine != "fsdp2":
            from accelerate.utils import DeepSpeedSequenceParallelConfig

            handler = DeepSpeedSequenceParallelConfig(sp_attn_implementation="sdpa", sp_seq_length_is_variable=True)
            sizes |= {"sp_backend": "deepspeed", "sp_handler": handler, "dp_replicate_size": world // shared}
        parallelism["parallelism_config"] = ParallelismConfig(**sizes)
    if engine == "fsdp2":
        settings = {"fsdp_version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
        settings["state_dict_type"] = "SHARDED_STATE_DICT" if in_parts else "FULL_STATE_DICT"
        return {"use_cpu": False, "fsdp": "full_shard", "fsdp_config": settings, **parallelism}
    zero = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": bf16},
        "zero_optimization": {
            "stage": int(engine[-1]),
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": 1000,
            "stage3_max_reuse_distance": 0,
            "stage3_prefetch_bucket_size": 100,
            "reduce_bucket_size": 1000,
            "stage3_gather_16bit_weights_on_model_save": not in_parts,
        },
    }
    return {"use_cpu": False, "deepspeed": zero, **parallelism}


def _train(options: dict[str, Any], engine: str, world: int, shared: int, device: str) -> dict[str, Any]:
    from peft import LoraConfig
    from support.tiny import tiny
    from support.training import logged, trainer

    torch.manual_seed(0)
    options = dict(options)
    n_sequences = world // shared
    settings = {
        "optim": "sgd",
        "max_steps": 3,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": options.pop("micro_batches", 4) // n_sequences,
        **_options(engine, world, shared, device, options.get("bf16", False), options.pop("in_parts", False)),
        "train_dataset": _repeating(**{"n": 24, **options.pop("documents", {})}),
        # ranks have as many batches each, so that no document is repeated to fill one
        "eval_dataset": _repeating(**{"n": 8, "longest": 12, "seed": 5, **options.pop("evaluated", {})}),
    }
    model, adapters = options.pop("model", {}), options.pop("adapters", None)
    resume, saves = options.pop("resume", None), options.pop("saves", False)
    if adapters is not None:
        settings["peft_config"] = LoraConfig(**adapters)
    folder = Path(options.pop("output_dir", f"{engine}-{world}-run"))
    quantized = options.pop("quantized", None)
    model = model if isinstance(model, str) else tiny(**model)
    if quantized is not None:
        settings["quantization_config"] = _in_4_bits(**quantized)
    if device == "cuda":
        settings["ddp_timeout"] = 90  # NCCL then ends a rank that waits for another in vain
    run = trainer(folder, model=model, **{**settings, **options})
    trained = [n for n, p in run.model.named_parameters() if p.requires_grad or quantized is None]
    in_parts = engine == "zero3" and world > 1
    before = _weights(run.model, trained, in_parts)
    run.train(resume_from_checkpoint=resume)
    if saves:
        run.save_model()
    steps = [{key: float(value) for key, value in entry.items()} for entry in logged(run, *LOGGED)]
    evaluated = {
        k: v for k, v in run.evaluate().items() if k.startswith(("eval_loss", "eval_ce", "eval_kl", "eval_rel"))
    }
    weights = _weights(run.model, trained, in_parts)
    if run.is_deepspeed_enabled and options.get("bf16"):  # which has rounded the weights that it begins with
        weights |= _of_optimizer(run.model, trained)
        weights = {name: before[name] + (weight - before[name].bfloat16()) for name, weight in weights.items()}
    moved = {name: (weight - before[name]).abs().max() for name, weight in weights.items()}
    return {"steps": steps, "evaluated": evaluated, "weights": weights, "moved": moved}


def _in_4_bits(**options: Any) -> Any:
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(**{"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", **options})


def _repeating(n: int, repeated: int = 0, **options: Any) -> Any:
    from support.training import documents

    return documents(n, **options).select([*range(n), *range(repeated)])


def _forget_ulysses() -> None:
    """Let another trainer of this process have Ulysses, which DeepSpeed sets up once for all."""
    from deepspeed.runtime.sequence_parallel import parallel_state_sp
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    parallel_state_sp._release_sequence_parallel_groups()
    ALL_ATTENTION_FUNCTIONS._local_mapping.pop("sdpa", None)


def _weights(model: Any, names: list[str], partitioned: bool) -> dict[str, torch.Tensor]:
    for module in model.modules():
        if hasattr(module, "reshard"):  # FSDP2 leaves the head gathered, in the dtype that it computes in
            # torch 2.11 takes the head's group for in the midst of a forward: TRL reads the head and does not call it
            module.set_reshard_after_forward(True, recurse=False)
            module.reshard()
    parameters = {name: p for name, p in model.named_parameters() if name in names}
    gathered: Any = nullcontext()
    if partitioned:
        import deepspeed

        gathered = deepspeed.zero.GatheredParameters(list(parameters.values()))
    with gathered:
        whole = {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in parameters.items()}
        return {n: p.detach().float().cpu().clone() for n, p in whole.items()}


def _of_optimizer(model: Any, names: list[str]) -> dict[str, torch.Tensor]:
    """The float32 weights that DeepSpeed trains beside those of 16 bits, where it does."""
    from deepspeed.utils import safe_get_full_fp32_param

    trained = {name: p for name, p in model.named_parameters() if name in names and p.requires_grad}
    return {name: safe_get_full_fp32_param(p).detach().cpu().clone() for name, p in trained.items()}


def _all_failed(out: Path, case: int, rank: int, world: int, wait: float = 20.0) -> bool:
    """Whether the other ranks fail in the same case too, so that none waits for another."""
    files = [out.with_name(f"{out.name}-failed-{case}-{r}") for r in range(world)]
    files[rank].touch()
    until = time.monotonic() + wait
    while time.monotonic() < until and not all(file.exists() for file in files):
        time.sleep(0.1)
    return all(file.exists() for file in files)


def main() -> None:
    out = Path(sys.argv[1])
    job = json.loads(out.with_suffix(".json").read_text())
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    engine, shared, device = job["engine"], job["shared"], job["device"]
    os.chdir(out.parent)
    if device == "cpu" and shared > 1 and engine == "fsdp2":
        from support import cpu_ring

        cpu_ring.install()
    results: Runs = {}
    for number, (name, options) in enumerate(job["cases"].items()):
        if shared > 1 and engine != "fsdp2":
            _forget_ulysses()
        print(f"{engine} on {world} ranks, {shared} a sequence: {name}", file=sys.stderr, flush=True)
        faulthandler.dump_traceback_later(_HANGS[device], exit=True)
        try:
            results[name] = _train(options, engine, world, shared, device)
        except Exception:
            results[name] = {"failed": traceback.format_exc()}
            if not _all_failed(out, number, rank, world):
                raise
        if rank == 0:
            torch.save(results, out.with_suffix(".pt"))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
        sys.stdout.flush()
        os._exit(0)  # threads of process groups that DeepSpeed has made can abort the process at its exit


if __name__ == "__main__":
    main()
