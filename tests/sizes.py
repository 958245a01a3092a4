"""Small sizes of slow tests, and the full ones, which DRAFTER_FULL_TESTS=1 in the environment chooses (hours)."""

import os
from typing import TypeVar

import pytest

IS_FULL = os.environ.get("DRAFTER_FULL_TESTS") == "1"
only_full = pytest.mark.skipif(not IS_FULL, reason="DRAFTER_FULL_TESTS=1 runs it")
T = TypeVar("T")


def size(small: T, full: T) -> T:
    """The small size, or the full one."""
    return full if IS_FULL else small
