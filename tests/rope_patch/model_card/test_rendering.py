"""A page says what a record says, and a record that somebody else wrote adds nothing to the page but text."""

import ast
import json
import re

import pytest
from huggingface_hub import ModelCard
from support.tiny import tiny

from rope_patch import patch_model
from rope_patch.base.papers import LONGLORA
from rope_patch.model_card import RECORD_NAME, EvalFigures, facts_of, read_runs, render

ATTACK = (
    'x")\nimport os\n\n# Owned\n<script>alert(1)</script> [a](https://evil.example) ![b](c)\n```\n# Owned\n---\n| `'
    " |\\| <b> https://evil.example\n"
)
RUN = {
    "objective": "clm", "view": "skip", "view_args": {"skip": {"law": "uniform"}}, "cue": ["a", "b"],
    "run": {
        "base_model": {"name": "base", "is_on_hub": True, "license": "mit", "revision": "v1"},
        "rescalings": [{"method": "ntk", "options": {"factor": 2.0, "note": "a"}}],
        "trained": "every weight", "dataset": "owner/books", "learning_rate": "0.01, constant", "papers": [LONGLORA],
        "versions": {"torch": "2"}, "native_window": 32, "documents": 3,
    },
}  # fmt: skip
REPORT = {"settings": {"dtype": "a", "model a": "a"}, "summary": [{"figure": "cliff", "values": {"a": 1.5}}]}


def hostile(value):
    if isinstance(value, dict):
        return {(name if name in KEPT else name + ATTACK): hostile(of) for name, of in value.items()}
    return [hostile(of) for of in value] if isinstance(value, list) else ATTACK if isinstance(value, str) else value


KEPT = {
    *RUN, *RUN["run"], *RUN["run"]["base_model"], "method", "options", "settings", "summary", "figure", "values",
    "earlier", "dtype",
}  # fmt: skip


def page(folder, change, is_adapter):
    (folder / RECORD_NAME).write_text(json.dumps(change({**RUN, "earlier": [RUN]})))
    (folder / "results.json").write_text(json.dumps(change(REPORT)))
    runs = read_runs(folder)
    model = patch_model(tiny(), "ntk", factor=2.0)
    facts = facts_of(model, runs, is_adapter=is_adapter, rescalings=runs[-1]["run"]["rescalings"])
    vars(facts)["figures"] = EvalFigures.read(folder, None)
    return ModelCard(render(facts, "a page"))


def outline(card):
    markdown_it = pytest.importorskip("markdown_it")
    tokens = markdown_it.MarkdownIt("commonmark", {"html": True}).enable("table").parse(card.text)
    inside = [child.type for token in tokens for child in token.children or []]
    return [token.type for token in tokens], {
        kind for kind in inside if "html" in kind or kind in ("link_open", "image")
    }


@pytest.mark.parametrize("is_adapter", [True, False], ids=["adapter", "model"])
def test_a_hostile_record_adds_nothing_but_text(is_adapter, tmp_path):
    (blocks, kinds), attacked = outline(page(tmp_path, lambda r: r, is_adapter)), page(tmp_path, hostile, is_adapter)
    assert kinds == {"link_open"}, "that to the base model, which is on the hub"
    assert outline(attacked) == (blocks, set())
    assert "Owned" in attacked.text and "alert(1)" in attacked.text, "it is shown"
    (code,) = re.findall(r"```python\n(.*?)\n```\n", attacked.content, re.DOTALL)
    calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Import)]
    assert calls == []
    assert attacked.data.license is attacked.data.datasets is attacked.data.base_model is None


def test_a_revision_of_any_name_is_one_text_of_the_code(tmp_path):
    run = {**RUN, "run": {**RUN["run"], "base_model": {**RUN["run"]["base_model"], "revision": 'a", b="c'}}}
    card = page(tmp_path, lambda record: record if "summary" in record else run, True)
    assert 'from_pretrained("base", dtype="auto", revision="a\\", b=\\"c")' in card.text


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"run": "a"}, "must hold an object as run, got 'a'"),
        ({"run": {**RUN["run"], "documents": "many"}}, "must hold a number as run.documents, got 'many'"),
        ({"run": {"rescalings": [{"method": "ntk"}]}}, r"must hold an object as run.rescalings\[0\].options, got None"),
        ({"run": {"base_model": {}}}, "must hold a text as run.base_model.name, got None"),
        ({"earlier": [1]}, r"must hold an object as earlier\[0\], got 1"),
    ],
)
def test_a_damaged_record_is_told_by_its_file(change, problem, tmp_path):
    (tmp_path / RECORD_NAME).write_text(json.dumps({**RUN, **change}))
    with pytest.raises(ValueError, match=f"{RECORD_NAME} {problem}.*Delete it, or copy it again"):
        read_runs(tmp_path)
