"""One server for all tests that leave it as they found it."""

from collections.abc import Iterator

import pytest

from tests.serving.live import Live, live_server


@pytest.fixture(scope="session")
def live() -> Iterator[Live]:
    with live_server() as server:
        yield server


@pytest.fixture
def idle(live: Live) -> Iterator[Live]:
    """The server, with a check that nothing is left running."""
    yield live
    live.wait_until_idle()
