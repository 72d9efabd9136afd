"""Packages of others, laid out as pip installs them: modules, and entry points in a .dist-info."""

import os
import subprocess
import sys
from contextlib import contextmanager

from rope_patch.eval import MEASURES
from rope_patch.rescalings import RESCALINGS
from rope_patch.views import VIEWS


def lay_out(folder, module, code, **entries):
    """Write the package `module` into `folder`.

    Args:
        folder: a folder of `sys.path`.
        module: its name.
        code: of the module.
        **entries: group without "rope_patch." -> names that the module registers.
    """
    folder.mkdir(exist_ok=True)
    (folder / f"{module}.py").write_text(code)
    about = folder / f"{module}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    lines = [
        f"[rope_patch.{group}]\n" + "".join(f"{n} = {module}\n" for n in names) for group, names in entries.items()
    ]
    (about / "entry_points.txt").write_text("\n".join(lines))


@contextmanager
def installed(folder, module, code, **entries):
    """`lay_out` in a folder of its own that this process finds packages in; what was registered is forgotten after."""
    from trl_ext.objectives import OBJECTIVES

    lay_out(folder, module, code, **entries)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop(module, None)
        for registry in (VIEWS, RESCALINGS, OBJECTIVES, MEASURES):
            for name in entries.get(registry.group.removeprefix("rope_patch."), ()):
                registry.pop(name, None)


def pip_install(folder, site):
    """Install the package in `folder` into `site`, without a network."""
    offline = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--upgrade", "--target", site]
    subprocess.run([sys.executable, "-m", "pip", "install", *offline, folder], check=True)


def run_python(site, folder, *arguments):
    """What a new Python says that finds packages in `site`."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(site), *filter(None, sys.path)])}
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=600
    )
