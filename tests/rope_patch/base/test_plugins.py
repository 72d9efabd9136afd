"""An installed package declares its views by entry points, and every command knows them."""

import os

import pytest
from support.launched import run_python

from rope_patch.base.plugins import GROUPS

MODULE = '''
from dataclasses import dataclass
import torch
from rope_patch.views import VIEWS, View

@VIEWS.register("stretched-far")
@dataclass(frozen=True)
class StretchedFar(View):
    """r(t) = 2 t.

    When: Take it in tests.
    """

    def draw(self, length, key):
        return {}

    def rope_index(self, t, parameters):
        return 2 * t
'''


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Lays out a package as pip does; gives a function that runs a command of `rope-patch` beside it."""

    def install(module=MODULE):
        (tmp_path / "far_views.py").write_text(module)
        about = tmp_path / "far_views-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: far-views\nVersion: 1.0\n")
        (about / "entry_points.txt").write_text("[rope_patch.views]\nstretched-far = far_views:StretchedFar\n")

        def command(*typed):
            return run_python("-m", "trl_ext", *typed, env={**os.environ, "PYTHONPATH": str(tmp_path)})

        return command

    return install


@pytest.mark.slow
def test_a_view_of_an_installed_package_is_known_to_the_commands(installed):
    done = installed()("methods", "stretched-far")
    assert done.returncode == 0 and "stretched-far, a view" in done.stdout and "Take it in tests." in done.stdout


@pytest.mark.slow
def test_a_package_that_cannot_be_imported_is_told_and_left_out(installed):
    done = installed("import nothing_of_this_name\n")("methods", "skip")
    assert done.returncode == 0 and "skip, a view" in done.stdout
    assert "rope_patch.views of far_views:StretchedFar: 'stretched-far' cannot be loaded: No module" in done.stderr


def test_there_is_a_group_for_each_registry():
    assert {group.removeprefix("rope_patch.") for group in GROUPS} == {"views", "rescalings", "objectives"}
