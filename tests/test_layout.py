"""Tests lie where the code lies: each file is named after the module or package of its folder that it tests."""

from pathlib import Path

import pytest

TESTS = Path(__file__).parent
ROOT = TESTS.parent

# what several modules only show together
SEVERAL = {
    "rope_patch": "first_use fsdp2 lifecycle matrix objective_matrix random_orders wrapped_after wrapping",
    "rope_patch/losses": "refusals",
    "rope_patch/views": "refusals",
    "trl_ext/cli": "mistakes",
    "trl_ext": "distributed fsdp2_trainer teacher_checks third_party uneven_batches zero3",
}


@pytest.mark.parametrize("package", ["rope_patch", "trl_ext"])
def test_a_test_file_is_named_after_what_it_tests(package):
    for file in sorted((TESTS / package).rglob("test_*.py")):
        folder = file.parent.relative_to(TESTS)
        what = file.stem.removeprefix("test_")
        code = {path.stem for path in (ROOT / folder).iterdir()}
        named = any(what == name or what.startswith(f"{name}_") for name in code)
        if what in SEVERAL.get(str(folder), "").split():
            assert not named, f"{file.name} has a module of its name: take it out of SEVERAL"
        else:
            assert named, f"{folder}/{file.name} is named after none of {folder}'s modules, see CONTRIBUTING.md"
