"""The fixtures of `tests/`, for tests of experiments and of their results."""

from conftest import fresh_memory_is_nan, log_levels, seed  # noqa: F401
