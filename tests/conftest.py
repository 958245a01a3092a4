"""Shared test settings: no network, one thread (many tiny tensors); tiny models; and the check of a refused command."""

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

os.environ["NO_PROXY"] = "*"  # servers of tests are on this machine
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("HF_DATASETS_CACHE", os.path.join(tempfile.gettempdir(), f"drafter-test-datasets-{os.getuid()}"))

Refused = Callable[..., None]
IS_FULL = os.environ.get("DRAFTER_FULL_TESTS") == "1"  # hours
T = TypeVar("T")


def size(small: T, full: T) -> T:
    """The small size of a slow test, or the full one."""
    return full if IS_FULL else small


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A new $DRAFTER_HOME."""
    monkeypatch.setenv("DRAFTER_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture(params=("avx512-vnni", "avx-vnni", "avx2", "plain"))
def instructions(request: pytest.FixtureRequest) -> Iterator[str]:
    """The native step runs with the instruction set's code, where the processor has the instructions."""
    from drafter.kernels import native

    best = native.instructions()
    if not native.use_instructions(request.param):
        pytest.skip("this processor has no such instructions")
    yield request.param
    native.use_instructions(best)


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny target."""
    from tests.tiny_files import make_target

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DRAFTER_HOME", str(tmp_path_factory.mktemp("home")))
        return make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def drafter(target: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of an untrained drafter for the target."""
    from tests.tiny_files import make_drafter

    return make_drafter(target, tmp_path_factory.mktemp("drafter"))


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    """Runs a command that must end with exit code 2, and one line that holds all parts."""
    from drafter.cli.main import main

    def check(words: list[str], *parts: str) -> None:
        assert main(words) == 2
        shown = capsys.readouterr().err
        lines = shown.splitlines()
        assert [line.startswith("drafter: error: ") for line in lines].count(True) == 1 and "Traceback" not in shown
        assert all(part in lines[-1] for part in parts), lines[-1]

    return check
