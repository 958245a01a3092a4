"""A tiny target and an untrained drafter for it as folders."""

import pytest

from tests.tiny_files import make_drafter, make_target


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DRAFTER_HOME", str(tmp_path_factory.mktemp("home")))
        return make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def drafter(target: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_drafter(target, tmp_path_factory.mktemp("drafter"))
