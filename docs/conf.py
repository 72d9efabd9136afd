"""Sphinx: the site of docs/, built by `make docs` into docs/_build/html."""

import re
import shutil
import sys
from importlib.metadata import version as version_of
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import commands  # noqa: E402
import gallery  # noqa: E402

project = "rope-patch"
author = "the developers of rope-patch"
copyright = f"2026, {author}"  # noqa: A001  a name of Sphinx
version = release = version_of("rope-patch")

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton", "sphinx_llms_txt"]
autodoc_typehints = "description"
autodoc_member_order = "bysource"
default_role = "code"  # docstrings have `names` in single backticks
myst_enable_extensions = ["colon_fence", "attrs_inline"]
myst_heading_anchors = 4  # links to headings, as GitHub has them
nb_execution_mode = "off"  # a test runs the notebooks
exclude_patterns = ["_build"]

smartquotes = False  # options are quoted as one types them

html_theme = "furo"
html_title = "rope-patch"
html_theme_options = {"source_repository": "https://github.com/rope-patch/rope-patch/", "source_directory": "docs/"}
copybutton_prompt_text = "$ "

REPOSITORY = "https://github.com/rope-patch/rope-patch/blob/main/"


def link_to_repository(app, name, lines):
    """Links to files outside docs/ lead to the repository."""
    folder = (HERE / f"{name}.md").parent

    def url(match):
        target = (folder / match[1]).resolve()
        inside = target.is_relative_to(HERE)
        return match[0] if inside else f"]({REPOSITORY}{target.relative_to(HERE.parent)}{match[2] or ''})"

    lines[0] = re.sub(r"\]\((\.\.[^)#\s]*)(#[^)\s]*)?\)", url, lines[0])


def write_pages(app):
    """Write the pages that code makes, and put the notebooks beside them."""
    gallery.main()
    commands.main()
    shutil.copytree(HERE.parent / "examples" / "notebooks", HERE / "tutorials", dirs_exist_ok=True)


def setup(app):
    """Make pages before Sphinx reads any, and lead links out of docs/ to the repository."""
    app.connect("builder-inited", write_pages)
    app.connect("source-read", link_to_repository)
