"""Huge pages: the content of the memory stays, and the kernel reports the pages."""

import sys
from pathlib import Path

import pytest
import torch

from drafter.kernels.huge_pages import use_huge_pages

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def anonymous_huge_bytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages"))


@pytest.mark.skipif(not SETTING.exists() or "[never]" in SETTING.read_text(), reason="this kernel has no huge pages")
def test_large_memory_moves_to_huge_pages_with_its_content() -> None:
    numbers = torch.arange(6 << 20)
    use_huge_pages()
    assert anonymous_huge_bytes() >= numbers.nbytes / 2
    assert torch.equal(numbers, torch.arange(6 << 20))


def test_other_systems_have_no_such_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert use_huge_pages() == 0
