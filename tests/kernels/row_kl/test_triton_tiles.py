"""Tiles fit the memory of GPUs that are not at hand, by the compiler's count; an H200 has those timed on it."""

import pytest
import torch
from support.compiled_kernels import GPUS, compile_for
from support.operators import IMPLEMENTATIONS, check_attention_map, check_relation, implementation, relations, visible

from rope_kernels.row_kl.triton_tiles import Tiles, tiles_of

pytest.importorskip("triton.backends.nvidia", reason="Triton has no compiler for NVIDIA's GPUs here")


@pytest.mark.parametrize(
    ("block_d", "element_size", "forward", "backward"),
    [
        (64, 2, Tiles(128, 128, 8, 2), Tiles(64, 64, 4, 2)),
        (128, 2, Tiles(128, 128, 8, 2), Tiles(64, 64, 4, 2)),
        (256, 2, Tiles(64, 64, 4, 1), Tiles(64, 64, 4, 1)),
        (512, 2, Tiles(64, 32, 4, 1), Tiles(64, 32, 4, 1)),
    ],
)
def test_an_h200_has_those_that_were_timed_on_it(block_d, element_size, forward, backward):
    h200 = (9, GPUS["H100"].shared_memory)
    assert tiles_of(block_d, element_size, "forward", *h200) == forward
    assert tiles_of(block_d, element_size, "backward", *h200) == backward


@pytest.mark.parametrize("stage", ["forward", "backward"])
@pytest.mark.parametrize(
    ("block_d", "tiles"), [(64, Tiles(64, 64, 16, 1)), (128, Tiles(64, 64, 16, 1)), (256, Tiles(32, 32, 16, 1))]
)
def test_float32_has_tiles_that_spill_next_to_nothing(block_d, tiles, stage):
    assert tiles_of(block_d, 4, stage, 9, GPUS["H100"].shared_memory) == tiles


@pytest.mark.parametrize("element_size", [2, 4])
def test_less_shared_memory_gives_smaller_tiles(element_size):
    shared_memory = (2**18, 2**17, 2**16, 2**15, 2**14, 0)
    for stage in ("forward", "backward"):
        sizes = [
            tiles.block_m * tiles.block_n
            for tiles in (tiles_of(128, element_size, stage, 8, shared) for shared in shared_memory)
        ]
        assert sizes == sorted(sizes, reverse=True) and sizes[-1] == 256


@pytest.mark.parametrize(
    ("shared_memory", "n", "border"),
    [(0, 40, None), (0, 40, 19), (2**15, 40, 19), (2**16, 40, None), (101_376, 80, 41)],
)
@pytest.mark.parametrize("name", IMPLEMENTATIONS[1:])
def test_all_sizes_are_exact(name, monkeypatch, shared_memory, n, border):
    """Tiles of 16 x 16, 32 x 16, 32 x 32 and 64 x 64, of one document or two."""
    device = implementation(name, monkeypatch)
    monkeypatch.setattr("rope_kernels.row_kl.triton_tiles._shared_memory", lambda device: (8, shared_memory))
    # numpy rounds products of small tiles in other ways forward and backward, and the more, the larger scores are
    student, teacher = relations(1, 2, n, 64, device=device, spread=0.5)
    documents = None if border is None else [[int(i >= border) for i in range(n)]]
    seen, weight = visible(n, documents=documents, device=device), torch.rand(1, 2, n, device=device)
    given = {} if border is None else {"cu_seqlens": [0, border, n]}
    check_relation(student, teacher, seen, weight, **given)
    q, k = student.detach().requires_grad_(), teacher.detach()[:, :1].requires_grad_()
    check_attention_map(q, k, teacher + 0.1, k.detach(), seen, weight, **given)


@pytest.mark.slow
@pytest.mark.parametrize("gpu", GPUS)
def test_kernels_compile_and_fit(tmp_path, gpu):
    used = compile_for(GPUS[gpu], tmp_path)
    kernels = {"_row_kl_fwd_kernel", "_relation_kl_bwd_kernel", "_attention_kl_dq_kernel", "_attention_kl_dk_kernel"}
    kernels |= {"_vocabulary_rows_kernel", "_decode_part_kernel"}
    if gpu == "H100":
        kernels |= {"_row_kl_hopper_fwd_kernel", "relation_kl_hopper_bwd_kernel"}
    assert kernels <= used.keys()
    assert {name: most for name, most in used.items() if most.shared > GPUS[gpu].shared_memory} == {}
    # a GPU keeps it for all threads that it can run at once: 1.5 KiB are 400 MiB of an H200
    assert {name: most for name, most in used.items() if most.local > 1536} == {}
