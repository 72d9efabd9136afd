"""Reading a model card, and running its code."""

import re

from huggingface_hub import ModelCard


def card_in(folder, name="README.md"):
    """The card in a folder, parsed as the hub does; what no card may have fails here."""
    text = (folder / name).read_text(encoding="utf-8")
    card = ModelCard(text)
    assert "None" not in text and "null" not in text
    assert not re.search(r"^\|[^|]+\| *\|$", text.split("## Evaluation")[0].replace("| |\n|---", ""), re.MULTILINE)
    for section in re.split(r"^## ", card.text, flags=re.MULTILINE)[1:]:
        heading, _, body = section.partition("\n")
        assert body.strip(), f"the section {heading!r} is empty"
    return card


def run_code(folder, monkeypatch):
    """Run the block of Python in the card of `folder` there, and return its names."""
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    monkeypatch.chdir(folder)
    names = {}
    exec(compile(code, "README.md", "exec"), names)
    return names
