"""Versions and device of a measurement, for its result files."""

import platform
from importlib.metadata import PackageNotFoundError, version

import torch

from ..version import __version__


def installed_versions(*packages: str) -> dict[str, str]:
    """Versions of this package, of Python and of those of `packages` that are installed."""
    versions = {"rope-patch": __version__, "python": platform.python_version()}
    for name in packages:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def device_name(cuda: bool) -> str:
    """Name of the GPU, or of the processor."""
    return torch.cuda.get_device_name() if cuda else platform.processor() or "cpu"
