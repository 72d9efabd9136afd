"""What a user gets from a package index: the files of wheel and sdist, their metadata, and the citation."""

import email
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from configparser import ConfigParser
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from support.pages import is_made

from rope_patch.version import __version__

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "rope_patch": ROOT / "rope_patch",
    "trl_ext": ROOT / "trl_ext",
    "rope_kernels": ROOT / "kernels/rope_kernels",
}
REPOSITORY = "https://github.com/rope-patch/rope-patch"
SOURCES = {  # a paper -> where we say that it is our source
    "RPSD": "docs/self_distillation.md",
    "LinearARD": "docs/distillation.md",
    "EndPrompt": "trl_ext/data/cues.py",
}
RAW = "https://raw.githubusercontent.com/rope-patch/rope-patch"


def files_under(folder):
    """Relative to `folder`, without what Python, an editable install and `make docs` leave behind."""
    made = re.compile(r"(^|/)(__pycache__|[^/]*\.egg-info)/")
    files = (path for path in folder.rglob("*") if path.is_file() and not is_made(path))
    names = (path.relative_to(folder).as_posix() for path in files)
    return {name for name in names if not made.search(name)}


def build(source, kind, target):
    """The file that the build back end makes of the project in `source`."""
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", target], cwd=source, check=True)
    (made,) = target.iterdir()
    return made


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    with zipfile.ZipFile(build(ROOT, "wheel", tmp_path_factory.mktemp("wheel"))) as archive:
        yield archive


@pytest.fixture(scope="module")
def unpacked_sdist(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sdist")
    shutil.unpack_archive(build(ROOT, "sdist", folder / "dist"), folder)  # tarfile's filter is there from 3.11.4 on
    return folder / f"rope_patch-{__version__}"


def from_wheel(wheel, file):
    return wheel.read(f"rope_patch-{__version__}.dist-info/{file}").decode()


def metadata(wheel):
    return email.message_from_string(from_wheel(wheel, "METADATA"))


def code_blocks(text):
    return re.findall(r"^```.*?^```", text, re.DOTALL | re.MULTILINE)


# the newest Transformers and PyTorch that the metadata of each program allows, in November 2026
PINS = {
    "axolotl 0.19": ("5.16.1", "2.13.0"),
    "ms-swift 4.6": ("5.19.0", "2.14.1"),
    "unsloth 2026.10.9": ("5.17.0", "2.14.1"),
    "LLaMA-Factory 0.9.5": ("5.6.0", "2.14.1"),
}


@pytest.mark.parametrize("program", PINS)
def test_installing_the_package_beside_a_program_moves_nothing_or_the_page_says_so(program):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ours = {requirement.name: requirement for requirement in map(Requirement, project["dependencies"])}
    assert [*ours] == ["torch", "transformers"]
    transformers, torch = PINS[program]
    moved = not (ours["transformers"].specifier.contains(transformers) and ours["torch"].specifier.contains(torch))
    page = (ROOT / "docs/other_trainers.md").read_text()
    (row,) = [line for line in page.splitlines() if line.startswith(f"| {program}")]
    assert ("moves Transformers" in row, "moves nothing" in row) == (moved, not moved)


@pytest.mark.slow
def test_the_wheel_holds_the_files_of_the_three_packages_and_no_others(wheel):
    files = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert files == {f"{name}/{file}" for name, folder in PACKAGES.items() for file in files_under(folder)}


@pytest.mark.slow
def test_the_wheel_holds_what_is_not_python(wheel):
    templates = {f"rope_patch/eval/templates/{name}" for name in ("report.css", "report.html.j2")}
    assert {f"{name}/py.typed" for name in PACKAGES} | templates <= set(wheel.namelist())


@pytest.mark.slow
def test_the_command_runs_from_the_wheel_alone(wheel, tmp_path):
    installed, empty = tmp_path / "installed", tmp_path / "empty"
    wheel.extractall(installed)
    empty.mkdir()
    scripts = ConfigParser()
    scripts.read_string(from_wheel(wheel, "entry_points.txt"))
    module, function = scripts["console_scripts"]["rope-patch"].split(":")
    code = f"""
from importlib.util import find_spec
print([find_spec(name).origin for name in {sorted(PACKAGES)}])
from {module} import {function}
{function}(["--help"])
"""
    environment = os.environ | {"PYTHONPATH": str(installed)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=empty, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"{installed}/") == 3 and "usage" in done.stdout


@pytest.mark.slow
def test_the_sdist_holds_all_that_tests_and_documentation_need(unpacked_sdist):
    folders = {"benchmarks", "docs", "examples", "kernels", "rope_patch", "tests", "trl_ext"}
    for folder in folders:
        assert files_under(unpacked_sdist / folder) == files_under(ROOT / folder)
    pages = {"README.md", "AGENTS.md", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE"}
    settings = {
        "Makefile",
        "constraints.txt",
        "pyproject.toml",
        ".ci",
        ".github",
        ".gitignore",
        ".pre-commit-config.yaml",
    }
    assert {path.name for path in unpacked_sdist.iterdir()} == folders | pages | settings | {"PKG-INFO"}


@pytest.mark.slow
def test_the_sdist_gives_the_same_wheel(unpacked_sdist, wheel, tmp_path):
    with zipfile.ZipFile(build(unpacked_sdist, "wheel", tmp_path)) as again:
        assert {file.filename: file.CRC for file in again.filelist} == {
            file.filename: file.CRC for file in wheel.filelist
        }


@pytest.mark.slow
def test_the_page_of_a_package_index_has_absolute_links_to_files_that_exist(wheel):
    text = metadata(wheel).get_payload()
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    ours = [link for link in links if link.startswith((REPOSITORY, RAW))]
    assert len(ours) > 10 and all(link.startswith(("https://", "#")) for link in links)
    for link in ours:
        file = re.fullmatch(rf"(?:{REPOSITORY}/blob|{RAW})/v{re.escape(__version__)}/([^#]+)(?:#.*)?", link)
        assert file and (ROOT / file[1]).exists(), link
        assert link.startswith(RAW) == (Path(file[1]).suffix in {".png", ".svg"}), link
    assert code_blocks(text) == code_blocks((ROOT / "README.md").read_text())


@pytest.mark.slow
def test_metadata_says_where_the_project_is_and_what_it_takes(wheel):
    fields = metadata(wheel)
    urls = dict(field.split(", ") for field in fields.get_all("Project-URL"))
    assert set(urls) == {"Homepage", "Documentation", "Changelog", "Issues"}
    assert all(url.startswith(REPOSITORY) for url in urls.values())
    for url in urls.values():
        _, _, file = url.partition("/main/")
        assert (ROOT / file).exists(), url
    assert fields["Version"] == __version__ and fields["License-Expression"] == "Apache-2.0"
    oldest = re.fullmatch(r">=3\.(\d+)", fields["Requires-Python"])[1]
    assert f"Programming Language :: Python :: 3.{oldest}" in fields.get_all("Classifier")
    assert f"Programming Language :: Python :: 3.{int(oldest) - 1}" not in fields.get_all("Classifier")


def test_the_citation_names_this_version_and_the_four_papers():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert (citation["version"], citation["license"]) == (__version__, "Apache-2.0")
    assert citation["repository-code"] == REPOSITORY
    papers = {paper["abbreviation"]: paper for paper in citation["references"]}
    assert set(papers) == {*SOURCES, "PosAug"}  # which is not on arXiv
    for name, page in SOURCES.items():
        (identifier,) = papers[name]["identifiers"]
        assert identifier["value"] in (ROOT / page).read_text()
        assert papers[name]["url"].endswith(identifier["value"].removeprefix("arXiv:"))
