"""Launches that keep what Triton compiled: they pass what Triton would pass, and only where its choice is the same."""

import pytest
import torch

from rope_kernels.common import launches
from rope_kernels.common.launches import Launch


class Compiled:
    """As much of Triton's compiled kernel as a launch takes."""

    def __init__(self, passed):
        self.passed = passed

    function, packed_metadata = 11, (12, 13)

    def run(self, *arguments):
        self.passed.append(("kept", *arguments))


class Kernel:
    """As much of a jitted function; `passed` are the launches, by Triton itself or by what it compiled."""

    arg_names = ("x_ptr", "y_ptr", "scale", "n", "BLOCK", "CAUSAL")

    def __init__(self):
        self.passed = []

    def __getitem__(self, grid):
        def launch(*arguments, **constants):
            self.passed.append(("bound", grid, arguments, constants))
            return Compiled(self.passed)

        return launch


@pytest.fixture
def kernel(monkeypatch):
    class Driver:
        active = type("", (), {"get_current_device": lambda: 1, "get_current_stream": lambda device: 70 + device})

    monkeypatch.setattr(launches, "driver", Driver)
    monkeypatch.setattr(launches, "CompiledKernel", Compiled)
    return Kernel()


def test_later_launches_run_what_the_first_one_compiled(kernel):
    launch = Launch(kernel, (3, 2), (0.5, 9), CAUSAL=True, BLOCK=16, num_warps=4)
    x, y, z = (torch.empty(64) for _ in range(3))
    launch(x, None)
    launch(y, None)
    launch(z, None)
    assert [kind for kind, *_ in kernel.passed] == ["bound", "kept", "kept"]
    assert kernel.passed[0][1:] == ((3, 2, 1), (x, None, 0.5, 9), {"CAUSAL": True, "BLOCK": 16, "num_warps": 4})
    # on the current device's stream, nothing for hooks, constants in the order of the parameters, no options
    for_hooks = (None, None, None)
    assert kernel.passed[2][1:] == (3, 2, 1, 71, 11, (12, 13), *for_hooks, z.data_ptr(), None, 0.5, 9, 16, True)


def test_an_address_that_is_no_multiple_of_16_goes_through_triton(kernel):
    launch = Launch(kernel, (3,), (0.5, 9), BLOCK=16, CAUSAL=True)
    x = torch.empty(64)
    for y in (x[1:], x, x[4:], x[2:], x[3:], x):
        launch(x, y)
    assert [kind for kind, *_ in kernel.passed] == ["bound", "bound", "kept", "bound", "bound", "kept"]


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_launches_go_through_triton_while_a_hook_listens(kernel, monkeypatch, name):
    launch = Launch(kernel, (3,), (0.5, 9), BLOCK=16, CAUSAL=True)
    x = torch.empty(64)
    launch(x, x)
    with monkeypatch.context() as patch:
        patch.setattr(getattr(launches.knobs.runtime, name), "calls", [print])
        launch(x, x)
    launch(x, x)
    assert [kind for kind, *_ in kernel.passed] == ["bound", "bound", "kept"]
