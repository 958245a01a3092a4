"""Tables of text: the examples of their documentation."""

import doctest

from drafter.utils import tables


def test_examples() -> None:
    found = doctest.testmod(tables)
    assert found.attempted == 2 and found.failed == 0
