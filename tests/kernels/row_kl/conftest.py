import pytest
from support.row_kl import IMPLEMENTATIONS, implementation


@pytest.fixture(params=IMPLEMENTATIONS)
def device(request, monkeypatch):
    return implementation(request.param, monkeypatch, request.node.callspec.params.get("dtype"))
