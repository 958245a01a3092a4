"""Counters of the CUDA device that computes nothing (pretend.c)."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

_NAMES = (
    "launch", "h2d_pinned", "h2d_pageable", "d2h", "d2d", "sync", "capture", "graph_launch", "violation",
    "captured_launch", "graphs",
)  # fmt: skip


def counts() -> dict[str, int]:
    """All counters since the process began; ``graphs`` is the number of graphs that exist now."""
    found = (ctypes.c_long * len(_NAMES))()
    ctypes.CDLL(None).pretend_counts(found)
    return dict(zip(_NAMES, found, strict=True))


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """A context whose counts are in the dictionary once it is left."""
    before, inside = counts(), dict[str, int]()
    yield inside
    inside.update({name: number - before[name] for name, number in counts().items()})
