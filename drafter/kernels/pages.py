"""Pages of memory: those of mapped files that a library has read, what was freed, and huge ones for packed weights."""

import ctypes
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

# Advice of Linux that loses nothing wherever it goes: another thread may unmap a file and get memory at the same place
# between our look at the map and our advice, and a page of a private mapping may have been written to.
_PAGE_OUT = 21
_HUGE_PAGE, _COLLAPSE = 14, 25  # for pages that come later, and, from Linux 6.1 on, for pages that are there
_HUGE = 2 << 20  # bytes of a huge page of x86, and of 64-bit ARM with small pages
_PAUSE = 0.05  # seconds in which a library reads some 100 MB


@contextmanager
def dropping(places: Sequence[Path | str]) -> Iterator[None]:
    """Drop the pages of mapped files again and again while a block reads these files.

    A library that copies a mapped file would otherwise hold two copies. The kernel reads a page again when somebody
    needs the page.

    Args:
        places: files, and folders of files.
    """
    if not sys.platform.startswith("linux"):
        yield
        return
    names, stop = tuple(str(Path(place).resolve()) for place in places), threading.Event()

    def drop() -> None:
        for start, end, rights, file in _mappings():
            if rights[0] == "r" and file.startswith(names):
                _advise(start, end, _PAGE_OUT)

    def watch() -> None:
        while not stop.wait(_PAUSE):
            drop()

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        stop.set()
        watcher.join()
        drop()


def trim() -> None:
    """Give memory that was freed back to the system, where the C library can."""
    if sys.platform.startswith("linux"):
        getattr(ctypes.CDLL(None), "malloc_trim", lambda _: 0)(0)


def use_huge_pages() -> None:
    """Move the large private memory of this process to huge pages, where Linux allows.

    A forward of one token reads all weights: with small pages the look-ups of addresses slow a small target down. Most
    systems give huge pages on request only, and OpenVINO does not ask. The content stays.
    """
    if not sys.platform.startswith("linux"):
        return
    for first, last, rights, file in _mappings():
        start, end = -(-first // _HUGE) * _HUGE, last // _HUGE * _HUGE
        if rights == "rw-p" and not file.startswith("/") and start < end:
            for advice in (_HUGE_PAGE, _COLLAPSE):
                _advise(start, end, advice)


def _mappings() -> Iterator[tuple[int, int, str, str]]:
    """Start, end, rights and file of each mapping of this process; private memory has no file, or `[a name]`."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, rights, _, _, _, *file = line.split(maxsplit=5)
        start, end = (int(edge, 16) for edge in span.split("-"))
        yield start, end, rights, "".join(file)


def _advise(start: int, end: int, advice: int) -> None:
    ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), advice)
