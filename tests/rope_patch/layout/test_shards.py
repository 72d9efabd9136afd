"""What ranks exchange of a row that they share, against plain indexing of the whole tensor."""

import os
import sys
from pathlib import Path

import pytest
import torch
from support.launched import run_ranks

SCRIPT = """
import os
import torch
from torch import distributed
from rope_patch.layout.shards import SequenceShard

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
distributed.init_process_group("gloo")
# heads that ranks divide, more and fewer of them; tokens as Ulysses, as a ring and as nobody splits rows
for n_heads in (4, 8, 3, 1):
    for split in ("in order", "ring", "random"):
        generator = torch.Generator().manual_seed(n_heads)  # alike on all ranks
        n, h = 16, -(-n_heads // world)
        whole, wanted = (
            torch.randn(2, heads, n, 3, generator=generator, dtype=torch.float64) for heads in (n_heads, h * world)
        )
        pieces = torch.arange(n).chunk(2 * world)
        index = {
            "in order": torch.arange(n).chunk(world)[rank],
            "ring": torch.cat([pieces[rank], pieces[-1 - rank]]),
            "random": torch.randperm(n, generator=generator).chunk(world)[rank],
        }[split]
        shard = SequenceShard({"input_ids": torch.zeros(2, n, dtype=torch.int64)}, index, distributed.group.WORLD)
        own = whole[:, :, index].clone().requires_grad_()
        rows = shard.by_heads(own)

        assert rows.shape == (2, h, n, 3)
        of_rank = slice(rank * h, (rank + 1) * h)
        expected = torch.zeros(2, h * world, n, 3, dtype=torch.float64)
        expected[:, :n_heads] = whole
        assert torch.equal(rows, expected[:, of_rank]), (n_heads, split)

        # sum over ranks of <wanted, rows>: each token's gradient comes from the rank that has its head
        (gradient,) = torch.autograd.grad(rows, own, wanted[:, of_rank], retain_graph=True)
        assert torch.equal(gradient, wanted[:, :n_heads, index]), (n_heads, split)

        # a permutation, whose transpose is its inverse
        (back,) = torch.autograd.grad(rows, own, rows)
        assert torch.equal(back, own), (n_heads, split)
distributed.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
@pytest.mark.parametrize("world", [2, 4])
def test_the_exchange_of_heads_is_indexing_of_the_whole_tensor(tmp_path, world):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    root = Path(__file__).parents[3]
    paths = os.pathsep.join([str(root), str(root / "kernels"), os.environ.get("PYTHONPATH", "")])
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        str(world),
        str(script),
    ]
    environment = {**os.environ, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = run_ranks(command, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
