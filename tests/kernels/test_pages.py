"""Mapped files leave the memory while a library reads the files."""

import mmap
import platform
import re
import sys
import time
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from drafter.kernels import pages
from drafter.kernels.pages import dropping, use_huge_pages

HUGE = Path("/sys/kernel/mm/transparent_hugepage")


def moves_pages() -> bool:
    """Whether this system moves pages to huge pages of 2 MiB: Linux 6.1 and later, unless switched off."""
    if not HUGE.exists() or "[never]" in (HUGE / "enabled").read_text():
        return False
    version = [int(number) for number in re.findall(r"\d+", platform.release())[:2]]
    return version >= [6, 1] and int((HUGE / "hpage_pmd_size").read_text()) == 2 << 20


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


def test_memory_that_takes_the_place_of_an_unmapped_file_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, size, usual = tmp_path / "file.bin", 1 << 25, sys.getswitchinterval()
    file.write_bytes(b"\1" * size)
    monkeypatch.setattr(pages, "_PAUSE", 0.0005)
    sys.setswitchinterval(0.0005)
    try:
        with pages.dropping([tmp_path]):
            for number in range(200):
                with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                    assert mapped[number] == 1
                    time.sleep(0.0004 * (number % 5))
                taken = np.full(size, 7, np.uint8)
                time.sleep(0.0005)
                assert taken[::4096].min() == 7
    finally:
        sys.setswitchinterval(usual)


@pytest.mark.skipif(not moves_pages(), reason="this system does not move pages to huge ones")
def test_large_private_memory_moves_to_huge_pages_and_keeps_its_content() -> None:
    numbers = np.arange(2 << 20)  # 16 MiB, mapped on their own
    use_huge_pages()
    sizes = [int(line.split()[1]) for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
             if line.startswith("AnonHugePages")]  # fmt: skip
    assert sum(sizes) >= 12 << 10
    assert (numbers == np.arange(2 << 20)).all()
