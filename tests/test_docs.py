"""Pages of the documentation: links lead somewhere, and what they name exists."""

import re
import runpy
from pathlib import Path

import pytest
import yaml
from support.pages import RESULTS, ROOT, is_made

from rope_patch.export import PROGRAMS
from rope_patch.rescalings import RESCALINGS
from rope_patch.views import VIEWS
from trl_ext.objectives import OBJECTIVES

PAGES = [ROOT / "README.md", *sorted(p for p in (ROOT / "docs").glob("*.md") if not is_made(p))]
METHODS = {*VIEWS, *RESCALINGS, *OBJECTIVES}


def anchors(page):
    """Of each heading what GitHub links to."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize(
    "page",
    sorted({*PAGES, *ROOT.glob("*.md"), *ROOT.glob("examples/**/README.md")}),
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_links_lead_to_files_and_headings(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        file, _, anchor = link.partition("#")
        if file.startswith("http"):
            continue
        target = (page.parent / file).resolve() if file else page
        if target.parent == ROOT / "docs" / "methods":  # pages of the gallery, which `make docs` writes
            assert target.stem in {*METHODS, "index"} and not anchor, link
            continue
        if target.parent == ROOT / "docs" / "tutorials":  # copies of the notebooks, made there too
            target = ROOT / "examples" / "notebooks" / target.name
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "mistakes.md"], ids=lambda page: page.stem)
def test_options_in_a_sentence_name_what_they_are_options_of(page):
    """`extend` refuses --objective-args alone, also where the objective is the one that it would take."""
    for span in re.findall(r"`([^`\n]*)`", page.read_text()):
        for name in re.findall(r"--(\w+)-args '", span):
            assert re.search(rf"--{name} ", span), span


def test_the_table_of_models_is_that_of_the_tests_of_every_family():
    def rows(page):
        lines = (ROOT / "docs" / page).read_text().splitlines()
        return [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]

    families = {row[0]: row for row in rows("composition.md") if len(row) == 11}
    named = [row for row in rows("support.md") if re.match(r"`\w+`", row[0])]
    assert len(named) == 7
    for types, scaling, views, self_distillation, _ in named:
        for family in re.findall(r"`(\w+)`", types):
            _, view, pi, yarn, abf, *_, distilled, _ = families[family]
            taken = {name for name, cell in {"pi": pi, "yarn": yarn, "abf": abf}.items() if cell == "yes"}
            assert taken == ({"pi", "yarn", "abf"} & set(re.findall(r"`(\w+)`", scaling)) or {"pi", "yarn", "abf"})
            assert (view == "yes") == (views != "no"), family
            assert re.sub(r" ?\[\d+\]", "", distilled) == self_distillation.removesuffix("no"), family


def test_the_page_on_serving_has_the_command_of_each_program():
    page = (ROOT / "docs" / "serving.md").read_text()
    for name, command in PROGRAMS.items():
        assert name == "transformers" or f"`{command(Path('FOLDER'), 65536)}`" in page
    assert set(re.findall(r"^\| `([\w.]+)`.* \| `", page, re.M)) == set(PROGRAMS)


def glossary():
    """Its text before the first word, and its words."""
    head, *entries = re.split(r"^## ", (ROOT / "docs" / "glossary.md").read_text(), flags=re.MULTILINE)
    return head, [entry.partition("\n")[0] for entry in entries]


def test_the_table_of_the_glossary_lists_its_words_in_their_order():
    head, words = glossary()
    assert re.findall(r"\[([^]]+)\]\(#", head) == words and len(set(words)) == len(words)


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/architecture.md"])
def test_files_that_a_page_names_exist(page):
    """Those that it names from the root; <name> and the like stand for files to be added."""
    folders = "kernels|rope_patch|trl_ext|research|benchmarks|tests|examples|docs"
    named = re.findall(rf"`((?:{folders})/[\w./]*)`", (ROOT / page).read_text())
    assert len(named) > 10
    missing = [name for name in named if not (ROOT / name).exists()]
    assert not missing


def test_the_picture_of_the_architecture_is_drawn_by_its_script_and_names_files_that_exist():
    from xml.etree import ElementTree

    script = runpy.run_path(str(ROOT / "docs" / "architecture.py"))
    svg = "{http://www.w3.org/2000/svg}"
    drawn = {"".join(text.itertext()).strip() for text in ElementTree.parse(script["TARGET"]).iter(f"{svg}text")}
    for lane, _, title, small in script["BOXES"].values():
        assert {title, *filter(None, small.split("\n"))} <= drawn, "run python docs/architecture.py"
        for name in re.findall(r"\b[\w/]+\.py\b", small):
            folder = ROOT / script["LANES"][lane][0]
            assert any(folder.rglob(name)), name


def test_every_page_and_file_of_results_can_be_found():
    """Pages from the index, files from a page."""
    pages = {page.name: page.read_text() for page in RESULTS.glob("*.md")}
    assert set(re.findall(r"\]\((\w+\.md)\)", pages["README.md"])) == set(pages) - {"README.md"}
    for file in RESULTS.glob("*.json*"):
        assert any(file.name in text for text in pages.values()), file.name


def test_every_package_that_exports_names_is_on_the_page_of_the_api():
    exporting = {
        ".".join(file.relative_to(ROOT / folder).parent.parts)
        for folder, package in (("", "rope_patch"), ("", "trl_ext"), ("kernels", "rope_kernels"))
        for file in (ROOT / folder / package).rglob("__init__.py")
        if "__all__" in file.read_text()
    }
    page = (ROOT / "docs" / "api.md").read_text()
    assert set(re.findall(r"^.. automodule:: ([\w.]+)$", page, re.M)) == exporting


def test_every_method_has_its_notes_for_the_gallery():
    notes = yaml.safe_load((ROOT / "docs" / "gallery.yaml").read_text())
    assert set(notes) == METHODS
    assert all((RESULTS / note["page"]).exists() for note in notes.values() if "found" in note)
