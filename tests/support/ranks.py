"""The trainer on several ranks against one: a script for torchrun, and what starts it and reads its results.

On a CPU ranks talk by gloo, on GPUs by NCCL. A case is options of `support.training.trainer` that JSON can hold, and
"adapters", options of LoRA; "documents" and "evaluated", of the datasets, with "repeated", how many of the first follow
the last; "model", options of the tiny model, or the folder of one; "resume", a checkpoint; "saves", whether the model
is saved at the end; "in_parts", whether engines that shard weights also save them so.
"""

import json
import os
import socket
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
PI = {"rescale": "pi", "rescale_args": {"factor": 4.0}}
SELF = {"objective": "self-distill", "view": "skip"}
RELATION = {"objective": "relation-distill", **PI}
ADAPTERS = {"r": 4, "target_modules": ["q_proj", "k_proj", "v_proj"]}
LOGGED = ("loss", "ce", "kl", "relation/", "hidden/", "view/", "grad_norm", "num_tokens", "weighted_ce", "view_ce")

Runs = dict[str, dict[str, Any]]
"""Name -> {"steps": entries of the log, "evaluated": metrics, "weights": name -> tensor on the CPU}."""


def run_on_ranks(
    folder: Path,
    cases: dict[str, dict[str, Any]],
    world: int,
    engine: str = "ddp",
    shared: int = 1,
    device: str = "cpu",
    **common: Any,
) -> Runs:
    """Train each case on `world` ranks.

    Args:
        folder: for files.
        cases: what to train, by name.
        world: ranks; 1 is a plain process.
        engine: "ddp", "fsdp2", "zero2" or "zero3".
        shared: ranks that share each sequence, by a ring under "fsdp2" and by Ulysses under ZeRO.
        device: "cpu" or "cuda".
        **common: options of all cases.
    """
    out = folder / f"{engine}-{world}-{shared}"
    job = {
        "engine": engine,
        "shared": shared,
        "device": device,
        "cases": {n: {**common, **c} for n, c in cases.items()},
    }
    out.with_suffix(".json").write_text(json.dumps(job))
    ours = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "tests")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*ours, os.environ.get("PYTHONPATH", "")]),
        # ninja, which builds DeepSpeed's kernels, is beside this Python, whether or not its environment is active
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "OMP_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",  # a rank that a signal ends says where
    }
    if device == "cpu":
        environment |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    elif world == 1:
        environment["CUDA_VISIBLE_DEVICES"] = "0"
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", str(world), "--master_port", str(_free_port())]
    command = [sys.executable, *(launcher if world > 1 else []), "-m", "support.ranks", str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, _what_was_said(done.stderr)
    results: Runs = torch.load(out.with_suffix(".pt"))
    return results


def _what_was_said(stderr: str, most: int = 40) -> str:
    """The last lines of each rank, and of what has no rank: torchrun's report, and what a signal left."""
    lines: dict[str, list[str]] = {}
    for line in stderr.splitlines():
        lines.setdefault(line.split(":")[0] if line.startswith("[rank") else "", []).append(line)
    return "\n".join("\n".join(said[-most:]) for _, said in sorted(lines.items(), reverse=True))


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])


def require_alike(alone: Runs, together: Runs, tolerance: float = 2e-5, weights: float = 1e-5) -> None:
    """Fail where steps, evaluations or weights of several ranks are not those of one.

    Args:
        alone: on one rank.
        together: on several.
        tolerance: of what is logged, relative; evaluations get fifty times as much, of weights that have gone apart.
        weights: of each weight, against the largest of its tensor.
    """
    assert alone.keys() == together.keys()
    for name, expected in alone.items():
        actual = together[name]
        for step, (ours, theirs) in enumerate(zip(actual["steps"], expected["steps"], strict=True)):
            _require_close(ours, theirs, tolerance, f"{name}, step {step}")
        _require_close(actual["evaluated"], expected["evaluated"], 50 * tolerance, f"{name}, evaluated")
        for key, weight in expected["weights"].items():
            gap = (actual["weights"][key] - weight).abs().max() / weight.abs().max().clamp(min=1e-6)
            assert gap < weights, f"{name}: {key} differs by {gap:.2g}"


def _require_close(actual: dict[str, float], expected: dict[str, float], tolerance: float, where: str) -> None:
    # TRL's own loss has no parts, and ours may stand in for it
    assert actual.keys() >= expected.keys(), (where, expected.keys() - actual.keys())
    for key, value in expected.items():
        assert abs(actual[key] - value) <= tolerance * max(abs(value), 0.1), (where, key, actual[key], value)


def _options(engine: str, world: int, shared: int, device: str, bf16: bool, in_parts: bool) -> dict[str, Any]:
    """Options of the trainer for an engine, in a process that may have had another trainer before."""
    from accelerate import PartialState
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType, ParallelismConfig

    if world == 1:
        return {"use_cpu": device == "cpu"}
    parallelism = {}
    if engine == "ddp":
        return {"use_cpu": device == "cpu", "ddp_find_unused_parameters": False}
    AcceleratorState._reset_state()
    if device == "cpu":
        # accelerate has FSDP and DeepSpeed for GPUs alone, unless it finds a state that says otherwise
        PartialState(cpu=True)
        kind = DistributedType.MULTI_GPU if engine == "fsdp2" else DistributedType.DEEPSPEED
        PartialState._shared_state["distributed_type"] = kind
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
        "gradient_accumulation_steps": 4 // n_sequences,
        **_options(engine, world, shared, device, options.get("bf16", False), options.pop("in_parts", False)),
        "train_dataset": _repeating(**{"n": 24, **options.pop("documents", {})}),
        # ranks have as many batches each, so that no document is repeated to fill one
        "eval_dataset": _repeating(**{"n": 8, "longest": 12, "seed": 5, **options.pop("evaluated", {})}),
    }
    model, adapters = options.pop("model", {}), options.pop("adapters", None)
    resume, saves = options.pop("resume", None), options.pop("saves", False)
    if adapters is not None:
        settings["peft_config"] = LoraConfig(**adapters)
    model = model if isinstance(model, str) else tiny(**model)
    folder = Path(options.pop("output_dir", f"{engine}-{world}-run"))
    run = trainer(folder, model=model, **{**settings, **options})
    run.train(resume_from_checkpoint=resume)
    if saves:
        run.save_model()
    steps = [{key: float(value) for key, value in entry.items()} for entry in logged(run, *LOGGED)]
    evaluated = {
        k: v for k, v in run.evaluate().items() if k.startswith(("eval_loss", "eval_ce", "eval_kl", "eval_rel"))
    }
    return {"steps": steps, "evaluated": evaluated, "weights": _weights(run.model, engine == "zero3" and world > 1)}


def _repeating(n: int, repeated: int = 0, **options: Any) -> Any:
    from support.training import documents

    return documents(n, **options).select([*range(n), *range(repeated)])


def _forget_ulysses() -> None:
    """Let another trainer of this process have Ulysses, which DeepSpeed sets up once for all."""
    from deepspeed.runtime.sequence_parallel import parallel_state_sp
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    parallel_state_sp._release_sequence_parallel_groups()
    ALL_ATTENTION_FUNCTIONS._local_mapping.pop("sdpa", None)


def _weights(model: Any, partitioned: bool) -> dict[str, torch.Tensor]:
    parameters = dict(model.named_parameters())
    gathered: Any = nullcontext()
    if partitioned:
        import deepspeed

        gathered = deepspeed.zero.GatheredParameters(list(parameters.values()))
    with gathered:
        whole = {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in parameters.items()}
        return {n: p.detach().float().cpu().clone() for n, p in whole.items()}


def main() -> None:
    out = Path(sys.argv[1])
    job = json.loads(out.with_suffix(".json").read_text())
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    engine, shared, device = job["engine"], job["shared"], job["device"]
    os.chdir(out.parent)
    if device == "cpu" and shared > 1 and engine == "fsdp2":
        from support import cpu_ring

        cpu_ring.install()
    results = {}
    for name, options in job["cases"].items():
        if shared > 1 and engine != "fsdp2":
            _forget_ulysses()
        print(f"{engine} on {world} ranks, {shared} a sequence: {name}", file=sys.stderr, flush=True)
        results[name] = _train(options, engine, world, shared, device)
    if rank == 0:
        torch.save(results, out.with_suffix(".pt"))
    if world > 1:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
        sys.stdout.flush()
        os._exit(0)  # threads of process groups that DeepSpeed has made can abort the process at its exit


if __name__ == "__main__":
    main()
