"""Where the package keeps files, and folders that are made of other files once, and are whole or not there.

A folder is filled beside its place, then renamed, under a lock file. Its record states the size of every file.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from drafter.utils.io import locked, recover, replacing
from drafter.utils.parse import read_json_object

_RECORD = "source.json"


def home_folder() -> Path:
    """`$DRAFTER_HOME`, or `~/.cache/drafter`."""
    return Path(os.environ.get("DRAFTER_HOME") or "~/.cache/drafter").expanduser().absolute()


def key_of(files: Iterable[Path], facts: Any = None) -> str:
    """24 hex digits that name what is made of files: other files, other bytes or other facts have another key.

    OSError: a file is missing.
    """
    stamps = {str(file.resolve()): [file.stat().st_size, file.stat().st_ctime_ns] for file in files}
    return hashlib.sha256(json.dumps([stamps, facts], sort_keys=True).encode()).hexdigest()[:24]


def keep(folder: Path, fill: Callable[[Path], None], source: Any = None) -> Path:
    """The folder, filled by ``fill`` unless :func:`is_whole`. Two processes at once: the second waits, and finds the
    folder done.

    Args:
        folder: its place.
        fill: writes the files into an empty folder.
        source: what the record says of the folder's origin.

    Raises:
        Exception: of ``fill``.
    """
    if is_whole(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = folder.parent / f".{folder.name}.lock"
    lock.touch()
    with locked(lock, seconds=math.inf):
        recover(folder)
        if is_whole(folder):
            return folder
        with replacing(folder, follows_links=False) as scratch:
            scratch.mkdir()
            fill(scratch)
            for file in scratch.iterdir():
                file.chmod(0o644)  # safetensors writes for one user only; a shared home is common
            record = {"source": source, "bytes": {file.name: file.stat().st_size for file in scratch.iterdir()}}
            (scratch / _RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return folder


def is_whole(folder: Path) -> bool:
    """Whether every file of a kept folder has its size."""
    try:
        sizes = read_json_object(folder / _RECORD)["bytes"]
        return bool(sizes) and all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
