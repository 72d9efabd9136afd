"""Compiles the Triton kernels for a GPU that is not here: a script, and what starts it and reads its results.

Triton compiles for any NVIDIA GPU on a machine without one, and only a launch needs it: here none is made.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]


class Gpu(NamedTuple):
    """Compute capability, as 90 for 9.0, and the bytes of shared memory that a block may have."""

    capability: int
    shared_memory: int


GPUS = {
    "A100": Gpu(80, 166_912),
    "RTX 4090": Gpu(89, 101_376),
    "H100": Gpu(90, 232_448),
    "RTX 5090": Gpu(120, 101_376),
}
# dtype, head_dim, whether rows hold several documents
CASES = [
    ("bfloat16", 64, True), ("bfloat16", 128, False), ("bfloat16", 256, False),
    ("float32", 64, False), ("float32", 128, False), ("float32", 256, False),
]  # fmt: skip


class Used(NamedTuple):
    """Bytes of shared memory of a block, and of local memory of a thread, which holds what registers do not."""

    shared: int
    local: int


def compile_for(gpu: Gpu, folder: Path) -> dict[str, Used]:
    """The most that each kernel takes, over all cases."""
    ours = [str(ROOT / "kernels"), str(ROOT / "tests")]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": os.pathsep.join(ours), "TRITON_CACHE_DIR": str(folder), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "support.compiled_kernels", *map(str, gpu)]
    job = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert job.returncode == 0, job.stderr[-4000:]
    return {name: Used(*used) for name, used in json.loads(job.stdout.splitlines()[-1]).items()}


def local_memory(cubin: bytes) -> int:
    """Bytes of local memory of a thread of a compiled kernel, by NVIDIA's cuobjdump, which comes with Triton."""
    import triton.backends.nvidia

    program = Path(triton.backends.nvidia.__path__[0]) / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(program), "--dump-resource-usage", file.name]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return max(int(size) for size in re.findall(r"\bSTACK:(\d+)", printed))


def _only_compile(gpu: Gpu) -> dict[str, Used]:
    """Let launches of this process compile for `gpu`; what kernels take by name, which grows as they do."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import jit
    from triton.runtime.driver import driver

    class Driver:
        """As much of a driver as compiling asks for."""

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", gpu.capability, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

    driver.set_active(Driver())
    used: dict[str, Used] = {}

    def compiled(kernel: Any, grid: Any) -> Any:
        def launch(*args: Any, **options: Any) -> None:
            made = kernel.warmup(*args, grid=grid, **options)
            name = kernel.fn.__name__
            before = used.get(name, Used(0, 0))
            local = local_memory(made.asm["cubin"])
            used[name] = Used(max(before.shared, made.metadata.shared), max(before.local, local))

        return launch

    jit.KernelInterface.__getitem__ = compiled
    return used


def main() -> None:
    import torch

    gpu = Gpu(*map(int, sys.argv[1:]))
    used = _only_compile(gpu)
    from rope_kernels.decode.triton_parts import decode_attention_in_parts
    from rope_kernels.row_kl import triton_attention_backward, triton_forward, triton_relation_backward, triton_tiles
    from rope_kernels.row_kl.visibility import Visibility
    from rope_kernels.vocabulary.rows import HeadOutput
    from rope_kernels.vocabulary.triton_rows import vocabulary_rows

    triton_tiles._shared_memory = lambda device: (gpu.capability // 10, gpu.shared_memory)
    for dtype, head_dim, packed in CASES:
        q, k = (torch.zeros(1, heads, 300, head_dim, dtype=getattr(torch, dtype)) for heads in (4, 2))
        grad, parts = torch.zeros(1, 4, 300), torch.zeros(4, 1, 4, 300)
        visibility = Visibility.of_documents(torch.zeros(1, 300, dtype=torch.int64)) if packed else Visibility(True)
        last = (0.1, 0.1, visibility)
        triton_forward.row_kl_forward(q, k, q, k, *last)
        triton_relation_backward.relation_kl_backward(grad, q, q, parts, *last)
        triton_attention_backward.attention_map_kl_backward(grad, q, k, q, k, parts, *last)
        if gpu.capability == 90 and head_dim <= 128 and dtype == "bfloat16":
            from rope_kernels.row_kl import hopper_forward, hopper_relation_backward

            for seen in (Visibility(True), Visibility.of_documents(torch.zeros(1, 300, dtype=torch.int64))):
                hopper_forward.row_kl_forward(q, k, q, k, 0.1, 0.1, seen)
                hopper_relation_backward.relation_kl_backward(grad, q, q, parts, 0.1, 0.1, seen)
        bounds = (torch.zeros(2, dtype=torch.int64), torch.ones(2, dtype=torch.int64))
        heads = (torch.zeros(2, 8, head_dim), *(torch.zeros(2, 2, 500, head_dim) for _ in range(2)))
        decode_attention_in_parts(*(x.to(q.dtype) for x in heads), *bounds, 0.1)
    labels, ones = torch.zeros(8, dtype=torch.int64), torch.ones(8)
    for gradient in (torch.bfloat16, None):
        vocabulary_rows(torch.zeros(16, 1000), labels, ones, ones, "jsd", HeadOutput(1.0, 30.0), gradient, ones)
    print(json.dumps(used))


if __name__ == "__main__":
    main()
