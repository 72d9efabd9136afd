"""Means that are logged: sums and counts of batches, on the model's device."""

import pytest
import torch
from accelerate import Accelerator
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from trl_ext.objectives.step_means import StepMeans


class Reads(TorchDispatchMode):
    """Devices of the tensors that operators read."""

    def __init__(self):
        super().__init__()
        self.devices = set()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.devices |= {value.device.type for value in args if isinstance(value, torch.Tensor)}
        return operator(*args, **(kwargs or {}))


def test_a_batch_is_added_without_a_copy_from_the_cpu():
    """A copy from memory that is not pinned makes the CPU wait for the GPU, once a forward."""
    means = StepMeans(Accelerator(cpu=True), ranks_alike=False)
    with FakeTensorMode():  # as on a GPU, also where there is none
        total, n_labels = torch.zeros((), device="cuda"), torch.ones((), dtype=torch.int64, device="cuda")
        with Reads() as reads:
            for count in (3, 0.5, n_labels):
                means.add({"ce": (total, count)})
    assert reads.devices == {"cuda"}


@pytest.mark.parametrize("ranks_alike", [False, True])
def test_a_mean_is_the_sum_over_batches_divided_by_their_counts(ranks_alike):
    means = StepMeans(Accelerator(cpu=True), ranks_alike=ranks_alike)
    for total, count in ((1.0, 3), (2.0, 0.5), (4.0, torch.tensor(2))):
        means.add({"ce": (torch.tensor(total), count), "kl": (torch.tensor(0.0), 0)})
    assert means.take() == {"ce": 7.0 / 5.5}, "and nothing of what no batch has"
    assert means.take() == {}
