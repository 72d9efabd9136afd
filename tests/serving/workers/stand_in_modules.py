"""Stand-ins for modules of a program of which only the rotary classes are here."""

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import torch


class Operator(torch.nn.Module):
    """The base of rotary classes: a module that runs its plain torch form."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__()

    @classmethod
    def register(cls, name: str, **options: Any) -> Any:
        return lambda registered: registered

    @classmethod
    def enabled(cls) -> bool:
        return False

    def forward(self, *args: Any, **options: Any) -> Any:
        return self.forward_native(*args, **options)


class _StandIn(ModuleType):
    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in ("CustomOp", "PluggableLayer", "BaseFusedOp"):
            return Operator
        if name.startswith(("is_", "has_", "cpu_has_", "get_bool_")):
            return lambda *args: name == "is_cpu"
        if name == "publish_role":
            return lambda: None
        return MagicMock(name=f"{self.__name__}.{name}")


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module of a package that no other finder found; the last on `sys.meta_path`."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.split(".")[0] != self.package:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


def install(package: str) -> None:
    sys.meta_path.append(StandIns(package))


def rotated_unit_vectors(rotary: torch.nn.Module, length: int, head_dim: int) -> torch.Tensor:
    """cos and sin of each position, [length, head_dim], as the class turns a vector of (1, .., 1, 0, .., 0)."""
    query = torch.cat((torch.ones(length, head_dim // 2), torch.zeros(length, head_dim // 2)), dim=-1)
    forward = getattr(rotary, "forward_native", rotary.forward)
    return forward(torch.arange(length), query, query.clone())[0].reshape(length, head_dim)
