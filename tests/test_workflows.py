"""Workflows: every action is pinned, every target of `make` exists, and only a tag publishes."""

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TEMPLATES = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def load(path):
    return yaml.load(path.read_text(), yaml.BaseLoader)  # BaseLoader: the key `on` stays a word


def steps(workflow):
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_with_the_version_beside(path):
    for step in steps(load(path)):
        if "uses" in step:
            assert re.fullmatch(r"[\w-]+/[\w./-]+@[0-9a-f]{40}", step["uses"])
            assert re.search(rf"{re.escape(step['uses'])}  # v\d+\.\d+\.\d+$", path.read_text(), re.MULTILINE)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_may_read_alone_and_stops(path):
    workflow = load(path)
    assert workflow["permissions"] == {} and "concurrency" in workflow
    for name, job in workflow["jobs"].items():
        assert job["permissions"] == ({"id-token": "write"} if name == "pypi" else {"contents": "read"})
        assert "timeout-minutes" in job


def test_targets_and_tests_that_a_workflow_names_exist():
    named = [word for path in WORKFLOWS for step in steps(load(path)) for word in step.get("run", "").split()]
    made = [target for make, target in zip(named, named[1:], strict=False) if make == "make"]
    assert set(made) <= TARGETS and {"lint", "test", "nightly"} <= set(made)
    assert all((ROOT / word).exists() for word in named if word.startswith("tests/"))


def test_only_a_tag_publishes():
    publishing = [path for path in WORKFLOWS if "pypi-publish" in path.read_text()]
    assert [load(path)["on"] for path in publishing] == [{"push": {"tags": ["v*"]}}]


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_an_issue_template_asks_for_something(path):
    form = load(path)
    assert form["name"] and form["description"] and all(field["attributes"]["label"] for field in form["body"])
