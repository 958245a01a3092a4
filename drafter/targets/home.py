"""Where the package keeps files, and the SHA-256 of files, remembered while the system says that a file is the same.

Reading the weights of a target costs seconds, so a file is read again only if its place on the disk, its size or one of
its times has changed. No program can set the time of the last change of a file's entry.
"""

import contextlib
import hashlib
import json
import os
import time
from pathlib import Path

from drafter.utils.io import write_atomic
from drafter.utils.parse import read_json

_FILE = "sums.json"
_TICK = 0.1  # seconds: two changes of a file within one tick of the clock have the same time


def home_folder() -> Path:
    """`$DRAFTER_HOME`, or `~/.cache/drafter`."""
    return Path(os.environ.get("DRAFTER_HOME") or "~/.cache/drafter").expanduser().absolute()


def sha256_of(file: Path) -> str:
    """The SHA-256 of a file, in hex (OSError: it cannot be read)."""
    key, stamp = _stamp(file)
    known = _known()
    if known.get(key, ["", ""])[0] == stamp:
        return known[key][1]
    start = time.time()
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    is_settled = start - file.stat().st_ctime > _TICK
    if is_settled and _stamp(file) == (key, stamp):
        with contextlib.suppress(OSError):  # without a place to remember, the next start reads again
            text = json.dumps(_known() | {key: [stamp, found]}, indent=0)
            write_atomic(home_folder() / _FILE, text, follows_links=False)
    return found


def _stamp(file: Path) -> tuple[str, str]:
    """A name of the file that no other file of this machine has, and what changes with its content."""
    found = os.stat(file)
    return f"{found.st_dev}:{found.st_ino}", f"{found.st_size}:{found.st_mtime_ns}:{found.st_ctime_ns}"


def _known() -> dict[str, list[str]]:
    try:
        found = read_json(home_folder() / _FILE)
        return {key: [str(stamp), str(digest)] for key, (stamp, digest) in found.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}
