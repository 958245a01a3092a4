"""Huge pages for weights that another library has allocated: fewer look-ups of addresses while the weights are read."""

import ctypes
import sys
from pathlib import Path

_PAGE = 2 << 20  # of x86 and of 64-bit ARM with small pages
_ADVISE, _COLLAPSE = 14, 25  # MADV_HUGEPAGE, MADV_COLLAPSE of Linux


def use_huge_pages() -> int:
    """Move the large private memory of this process to huge pages, where Linux allows; number of bytes.

    Linux gives huge pages on request only, and other libraries do not ask. The content stays.
    """
    if not sys.platform.startswith("linux"):
        return 0
    madvise = ctypes.CDLL(None).madvise
    num_bytes = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, rights, *_, inode = line.split(maxsplit=5)[:5]
        start, end = (int(edge, 16) for edge in span.split("-"))
        start, end = -(-start // _PAGE) * _PAGE, end // _PAGE * _PAGE
        if not rights.startswith("rw-p") or inode != "0" or start >= end:
            continue
        where = ctypes.c_void_p(start), ctypes.c_size_t(end - start)
        if madvise(*where, _ADVISE) == madvise(*where, _COLLAPSE) == 0:
            num_bytes += end - start
    return num_bytes
