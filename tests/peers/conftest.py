"""Where the peers' own tests are."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

VARIABLE = "ROPE_PATCH_PEERS"


@pytest.fixture(scope="session")
def peer_folder() -> Callable[[str], Path]:
    """The folder of one peer's checkout, as `peer_folder("trl")`; without one the test is skipped."""

    def find(name: str) -> Path:
        peers = os.environ.get(VARIABLE)
        if not peers:
            pytest.skip(f"{VARIABLE} names no folder of checkouts of other projects: see tests/peers/README.md")
        folder = Path(peers).resolve() / name
        if not folder.is_dir():
            pytest.skip(f"{VARIABLE} has no folder {name}: see tests/peers/README.md")
        return folder

    return find
