"""The fixtures of `tests/`, for tests of experiments and of their results."""

from conftest import fresh_state  # noqa: F401
