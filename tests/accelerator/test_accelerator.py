"""The package on an accelerator that refuses: processes side by side run :mod:`tests.accelerator.cases`."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.utils import backend_registration

PARTS = ("steps", "kernels", "not steps and not kernels")


@pytest.fixture(scope="module")
def processes() -> Iterator[dict[str, subprocess.Popen[str]]]:
    command = [sys.executable, "-m", "pytest", str(Path(__file__).with_name("cases.py")), "-k"]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    found = {part: subprocess.Popen([*command, part], **output) for part in PARTS}
    yield found
    for process in found.values():
        process.kill()


@pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch registers no devices from Python",
)
@pytest.mark.parametrize("part", PARTS)
def test_cases(part: str, processes: dict[str, subprocess.Popen[str]]) -> None:
    text, _ = processes[part].communicate()
    assert processes[part].returncode == 0, text
