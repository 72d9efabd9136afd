"""A plugin of pytest that prints what `-k` looks in, a line for each test."""

import pytest


def pytest_collection_finish(session: pytest.Session) -> None:
    """`::`, the id and the keywords of each test, with tabs between them."""
    for item in session.items:
        print("::", item.nodeid, item.path.name, *item.listextrakeywords(), sep="\t")
