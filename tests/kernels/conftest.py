import pytest
from support.operators import IMPLEMENTATIONS, implementation


@pytest.fixture(params=IMPLEMENTATIONS)
def device(request, monkeypatch):
    """The device of each implementation, which the operators use during the test."""
    return implementation(request.param, monkeypatch, request.node.callspec.params.get("dtype"))
