"""`rope-patch new`: what it writes passes its own tests, and is found by its name once it is installed."""

import pytest
from support.packages import pip_install, run_python

from trl_ext import cli
from trl_ext.cli.new import KINDS

FOUND = {
    "view": "from rope_patch.views import VIEWS as known",
    "rescaling": "from rope_patch.rescalings import RESCALINGS as known",
    "objective": "from trl_ext.objectives import OBJECTIVES as known",
    "measure": "from rope_patch.eval import MEASURES as known",
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_new_package_passes_its_tests_and_is_found_by_its_name(kind, tmp_path, capsys):
    folder, site = tmp_path / "far-off", tmp_path / "site"
    assert cli.main(["new", kind, "far-off", "--output", str(folder)]) == 0
    assert f"pip install -e {folder} && pytest {folder}" in capsys.readouterr().out
    pip_install(folder, site)
    tests = run_python(site, folder, "-m", "pytest", "-q", "test_far_off.py")
    assert tests.returncode == 0 and "2 passed" in tests.stdout, tests.stdout
    found = f"{FOUND[kind]}; import sys; assert 'far_off' not in sys.modules; known['far-off']; sys.modules['far_off']"
    assert run_python(site, tmp_path, "-c", found).returncode == 0


@pytest.mark.parametrize("kind", KINDS)
def test_only_module_tests_and_settings_are_written_and_nothing_is_left_to_fill_in(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["new", kind, "far-off"]) == 0
    written = {path.name: path.read_text() for path in (tmp_path / "far-off").iterdir()}
    assert set(written) == {"pyproject.toml", "far_off.py", "test_far_off.py"}
    assert all("$" not in text for text in written.values())
    assert f'[project.entry-points."rope_patch.{kind}s"]\nfar-off = "far_off"' in written["pyproject.toml"]
    assert "far-off" in written["far_off.py"]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("FarOff", "NAME must be lower-case words with hyphens between them, such as far-half, got 'FarOff'"),
        ("far_off", "NAME must be lower-case words"),
        ("json", "NAME 'json' is taken by a method of rope-patch or by an installed module: choose another"),
        ("skip", "NAME 'skip' is taken"),
    ],
)
def test_a_name_that_cannot_be_used_is_refused(name, why, tmp_path, capsys):
    assert cli.main(["new", "view", name, "--output", str(tmp_path / "out")]) == 2
    assert why in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_folder_with_files_is_left_alone(tmp_path, capsys):
    (tmp_path / "mine.py").write_text("x = 1")
    assert cli.main(["new", "view", "far-off", "--output", str(tmp_path)]) == 2
    assert "is not empty: choose another folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.py"]
