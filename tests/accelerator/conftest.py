"""A process runs :mod:`tests.accelerator.cases` beside all other tests; its result is awaited last."""

import subprocess
import sys
from pathlib import Path

import pytest

CASES: list[subprocess.Popen[str]] = []


def is_awaiting(item: pytest.Item) -> bool:
    return item.path == Path(__file__).with_name("test_accelerator.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=is_awaiting)


def pytest_collection_finish(session: pytest.Session) -> None:
    if any(map(is_awaiting, session.items)) and not session.config.option.collectonly:
        command = [sys.executable, "-m", "pytest", str(Path(__file__).with_name("cases.py"))]
        CASES.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))


def pytest_sessionfinish() -> None:
    for process in CASES:
        process.kill()
        process.wait()
