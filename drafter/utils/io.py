"""Files that are whole or not there: written beside their place and renamed."""

import os
from pathlib import Path


def write_atomic(path: Path, text: str) -> None:
    """Write `text` (UTF-8) so that `path` holds either all of it or what it held before; OSError when it cannot."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with scratch.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def check_writable(out: Path) -> None:
    """Find out before the work, not after it, that a result file cannot be written (OSError)."""
    if out.is_dir():
        raise IsADirectoryError(f"--out {out} is a folder: name a file in it")
    out.parent.mkdir(parents=True, exist_ok=True)
    probe = out.with_name(f".{out.name}.probe")
    probe.touch()
    probe.unlink()
