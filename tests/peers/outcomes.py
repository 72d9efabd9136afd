"""Run tests of another project in a process of their own, and compare two runs of them test by test."""

import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Outcome:
    kind: str  # "passed", "failed" or "skipped"
    message: str = ""


@dataclass(frozen=True)
class Refusal:
    """Tests that fail on purpose: each must raise an error that contains `error`."""

    error: str
    reason: str
    tests: tuple[str, ...]


def run_python(*arguments: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run this Python in `folder`, offline, with our packages and these helpers on its path."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=environment | variables, capture_output=True, text=True)


def run_tests(
    selection: Iterable[str], *, checkout: Path, folder: Path, report: Path, plugin: str, **variables: str
) -> dict[str, Outcome]:
    """Run the tests `selection` of `checkout` from `folder` with `plugin`; name of a test -> its outcome.

    Raises:
        RuntimeError: no test ran, with the end of what pytest printed.
    """
    # neither our settings nor those of the checkout, which may name plugins that are not installed
    settings = ["-c", os.devnull, "--rootdir", str(checkout), "--import-mode=importlib", "-p", "no:cacheprovider"]
    run = run_python(
        "-m", "pytest", "-q", *settings, "-p", plugin, f"--junitxml={report}", *selection, folder=folder, **variables
    )
    outcomes = read_report(report) if report.exists() else {}
    if not outcomes:
        raise RuntimeError(f"no test of {checkout} ran:\n{run.stdout[-3000:]}\n{run.stderr[-3000:]}")
    return outcomes


def read_report(report: Path) -> dict[str, Outcome]:
    """Name of a test -> its outcome, from pytest's JUnit XML; a test that fails in its teardown has failed."""
    outcomes: dict[str, Outcome] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        outcome = Outcome("passed")
        for kind, tags in (("skipped", ("skipped",)), ("failed", ("failure", "error"))):
            for element in (case.find(tag) for tag in tags):
                if element is not None:
                    outcome = Outcome(kind, element.get("message", ""))
        name = case.get("name", "")  # a test that was interrupted has none
        if name not in outcomes or outcome.kind == "failed":
            outcomes[name] = outcome
    return outcomes


def count(outcomes: Mapping[str, Outcome]) -> dict[str, int]:
    kinds = [outcome.kind for outcome in outcomes.values()]
    return {kind: kinds.count(kind) for kind in ("passed", "failed", "skipped")}


def differences(
    stock: Mapping[str, Outcome], ours: Mapping[str, Outcome], refusals: Iterable[Refusal] = ()
) -> list[str]:
    """What is not as it should be: whatever passes in `stock` passes in `ours`, but for the tests of `refusals`.

    A test of `refusals` that passes is listed too, and one that fails with another error. Tests that `stock` does not
    pass say nothing about us, and refusals of tests that are not in this version of the peer say nothing either.
    """
    refusal_of = {test: refusal for refusal in refusals for test in refusal.tests}
    lines = []
    for test, outcome in stock.items():
        if outcome.kind != "passed":
            continue
        came = ours.get(test, Outcome("missing"))
        refusal = refusal_of.get(test)
        if refusal is None and came.kind != "passed":
            lines.append(f"{test}: stock passes, ours is {came.kind}: {came.message}")
        elif refusal is not None and came.kind == "passed":
            lines.append(f"{test}: passes, so that it is no refusal any more ({refusal.reason})")
        elif refusal is not None and refusal.error not in came.message:
            lines.append(f"{test}: should be refused with {refusal.error!r}, is {came.kind}: {came.message}")
    return lines
