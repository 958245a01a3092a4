"""Mapped files leave the memory while a library reads the files."""

import sys
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from drafter.kernels.pages import dropping


@pytest.mark.skipif(sys.platform != "linux", reason="pages are dropped on Linux only")
@pytest.mark.parametrize("mode", ["r", "c"])
def test_files_that_were_read_leave_the_memory_and_written_pages_stay(tmp_path: Path, mode: Literal["r", "c"]) -> None:
    file = tmp_path / "numbers"
    np.arange(4 << 20).tofile(file)
    read = np.memmap(file, dtype=np.int64, mode=mode)
    written = np.memmap(file, dtype=np.int64, mode="c")
    written[5] = -1
    before = resident_file_bytes()
    with dropping([tmp_path]):
        total = int(read.sum())
    assert resident_file_bytes() < before + read.nbytes / 2
    assert total == int(read.sum()) and written[5] == -1 and resident_file_bytes() >= before + read.nbytes / 2


def resident_file_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("RssFile"))
