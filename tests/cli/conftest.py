"""A tiny target and an untrained drafter for it as folders, and the check of a command that is refused."""

from collections.abc import Callable

import pytest

from drafter.cli.main import main
from tests.tiny_files import make_drafter, make_target

Refused = Callable[..., None]


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DRAFTER_HOME", str(tmp_path_factory.mktemp("home")))
        return make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def drafter(target: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_drafter(target, tmp_path_factory.mktemp("drafter"))


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    """Runs a command that must end with exit code 2, and one line that holds all parts."""

    def check(words: list[str], *parts: str) -> None:
        assert main(words) == 2
        shown = capsys.readouterr().err
        lines = shown.splitlines()
        assert [line.startswith("drafter: error: ") for line in lines].count(True) == 1 and "Traceback" not in shown
        for part in parts:
            assert part in lines[-1]

    return check
