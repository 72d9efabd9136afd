"""`pytest -k NAME` finds what tests a view, a rescaling or an objective: its own file, its cells of the matrices."""

from pathlib import Path

import pytest
from support.launched import run_python

from rope_patch.rescalings import RESCALINGS
from rope_patch.views import VIEWS
from trl_ext.objectives import OBJECTIVES

ROOT = Path(__file__).parents[1]
# beside the file of its own: the matrix that goes through all of them
REGISTRIES = {
    "tests/rope_patch/test_views_matrix.py": VIEWS,
    "tests/rope_patch/test_rescalings.py": RESCALINGS,
    "tests/rope_patch/test_objective_matrix.py": OBJECTIVES,
}
NO_CELLS = {"drop-rope"}  # a rescaling without frequencies


def own_file(cls: type) -> str:
    *folders, stem = cls.__module__.split(".")
    return "/".join(["tests", *folders, f"test_{stem}.py"])


@pytest.fixture(scope="module")
def keywords() -> list[tuple[str, str]]:
    """(file, what `-k` looks in) of the tests in all files of their own and in the matrices."""
    files = {own_file(cls) for registry in REGISTRIES.values() for cls in registry.values()}
    files = [*sorted(file for file in files if (ROOT / file).exists()), *REGISTRIES]
    options = ["--collect-only", "-qq", "-p", "no:cacheprovider", "-p", "support.keywords"]
    done = run_python("-m", "pytest", *options, *files, cwd=ROOT)
    done.check_returncode()
    lines = [line.split("\t") for line in done.stdout.splitlines() if line.startswith("::\t")]
    return [(i.partition("::")[0], "\t".join([i.partition("::")[2], *words])) for _, i, *words in lines]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("matrix", "name"), [(matrix, name) for matrix, registry in REGISTRIES.items() for name in registry]
)
def test_its_name_selects_its_own_file_and_its_cells(matrix, name, keywords):
    file = own_file(REGISTRIES[matrix][name])
    assert (ROOT / file).exists(), f"{file} is missing"  # it may hold cases of the matrix alone
    selected = {where for where, words in keywords if name in words}
    assert selected & ({file} if name in NO_CELLS else {matrix}), f"no test has {name} in its id"
