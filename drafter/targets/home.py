"""Where the package keeps files, and the SHA-256 of files, remembered while the system says that a file is the same.

Reading the weights of a target costs seconds, so a file is read again only if its place on the disk, its size or one of
its times has changed. No program can set the time of the last change of a file's entry.
"""

import contextlib
import hashlib
import os
import time
from pathlib import Path

from drafter.utils.io import write_atomic

_TICK = 0.1  # seconds: two changes of a file within one tick of the clock have the same time


def home_folder() -> Path:
    """`$DRAFTER_HOME`, or `~/.cache/drafter`."""
    return Path(os.environ.get("DRAFTER_HOME") or "~/.cache/drafter").expanduser().absolute()


def sha256_of(file: Path) -> str:
    """The SHA-256 of a file, in hex (OSError: it cannot be read)."""
    record = _record(file)
    with contextlib.suppress(OSError, ValueError):
        known = record.read_text(encoding="utf-8")
        if len(bytes.fromhex(known)) == hashlib.sha256().digest_size:
            return known
    start = time.time()
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    is_settled = start - file.stat().st_ctime > _TICK
    if is_settled and _record(file) == record:
        with contextlib.suppress(OSError):  # without a place to remember, the next start reads again
            write_atomic(record, found, follows_links=False)
    return found


def _record(file: Path) -> Path:
    """Where the digest is remembered: a name that no other file of this machine has, and no other content of this."""
    found = os.stat(file)
    stamp = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
    return home_folder() / "sums" / "-".join(map(str, stamp))
