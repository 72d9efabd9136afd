"""TRL's own tests of SFTTrainer with RopeSFTTrainer in its place: whatever passes with TRL's passes with ours."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from peers.outcomes import Outcome, count, differences, run_python, run_tests
from peers.trl.refusals import OF_EVERY_TRAINING, OF_EVERY_VIEW, OF_SELF_DISTILLATION

pytestmark = pytest.mark.slow

VIEW = {"view": "skip", "view_args": {"skip": {"law": "uniform", "high": 64}}}


@pytest.fixture(scope="module")
def checkout(peer_folder: Callable[[str], Path]) -> Path:
    return peer_folder("trl")


@pytest.fixture(scope="module")
def hub(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub")
    built = run_python("-m", "peers.trl.hub", str(checkout), str(folder), folder=folder)
    assert built.returncode == 0, built.stderr[-3000:]
    return folder


def run(checkout: Path, hub: Path, name: str, **variables: str) -> dict[str, Outcome]:
    outcomes = run_tests(
        [str(checkout / "tests/test_sft_trainer.py") + "::TestSFTTrainer"],
        checkout=checkout,
        folder=hub,
        report=hub / f"{name}.xml",
        plugin="peers.trl.in_place",
        **variables,
    )
    print(name, count(outcomes))
    return outcomes


@pytest.fixture(scope="module")
def stock(checkout: Path, hub: Path) -> dict[str, Outcome]:
    """What TRL's own trainer does on this machine: the measure for ours."""
    outcomes = run(checkout, hub, "stock")
    assert count(outcomes)["passed"] > 80, [each for each in outcomes.items() if each[1].kind == "failed"]
    return outcomes


@pytest.mark.parametrize(
    ("name", "options", "refusals"),
    [
        ("standard", {}, OF_EVERY_TRAINING),
        ("skip", VIEW, OF_EVERY_VIEW),
        ("self-distill", {"objective": "self-distill", **VIEW}, OF_SELF_DISTILLATION),
    ],
)
def test_what_passes_with_trls_trainer_passes_with_ours(
    checkout: Path, hub: Path, stock: dict[str, Outcome], name: str, options: dict[str, Any], refusals: list[Any]
) -> None:
    ours = run(checkout, hub, name, ROPE_SFT_OPTIONS=json.dumps(options))
    assert not differences(stock, ours, refusals)
