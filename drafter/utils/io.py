"""Output files and folders that are whole or not there, and the first line of an error.

A version is written into a hidden folder beside its place, ``.NAME.RANDOM.tmp``, which its writer keeps locked. Then a
file is renamed over the old one. A folder cannot be: the old one is renamed into the hidden folder, the new one is
renamed in, the hidden folder is removed. A kill between the two renames leaves both versions in the hidden folder, and
:func:`recover` finishes the swap at the next start.
"""

import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
import stat
import sys
import time
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path

_NEW, _OLD, _GONE = "new", "old", "gone"  # the versions in a hidden folder
_STREAMS = ("/dev/stdout", "/dev/stderr", "/dev/fd/", "/proc/self/fd/")  # regular files where the shell redirects
_LOCK_NOTICE, _LOCK_SECONDS = 1.0, 60.0  # a wait for a lock says so, and ends; any reader of a folder may hold its lock


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or the first two if a colon ends it; the error's type where it has no text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1]) if lines else type(error).__name__


def printable(text: str, length: int = 300) -> str:
    """The text in one line of at most ``length`` characters; U+FFFD stands for what a terminal would obey."""
    line = " ".join(text.split())
    shown = "".join(char if char.isprintable() else "\ufffd" for char in line[: length + 1])
    return shown if len(shown) <= length else shown[:length] + " ..."


def run_file(output: Path) -> Path:
    """Where the run record of an output lies: `DIR/run.json`, or `NAME.run.json` beside a file `NAME.jsonl`."""
    return output / "run.json" if output.is_dir() else output.with_suffix(".run.json")


def is_stream(path: Path) -> bool:
    """Whether `path` is a pipe, a device or a standard stream: written to, never replaced, without a run record."""
    is_special = path.exists() and not path.is_file() and not path.is_dir()
    return is_special or str(path).startswith(_STREAMS)


def check_output(out: Path, *, overwrite: bool = False) -> None:
    """Refuse, before the work, an output file that cannot be written or that holds something else.

    An empty file may be replaced, and a file that an earlier run wrote: its run record names the file.

    Raises:
        ValueError: another file stands there and `overwrite` is not set.
        OSError: a folder stands there, or the place is not writable.
    """
    if out.is_dir():
        raise IsADirectoryError(f"--out {out} is a folder: name a file in it")
    if is_stream(out):
        return
    may_replace = overwrite or not out.exists() or not out.stat().st_size
    if not (may_replace or _is_recorded(out)):
        raise ValueError(f"--out {out} exists and no earlier run wrote it: give another file, or --overwrite")
    place = out.resolve()
    place.parent.mkdir(parents=True, exist_ok=True)
    with _hidden_folder(place):
        pass


def check_output_folder(out: Path, *, mark: str, files: Sequence[str], what: str) -> None:
    """Refuse an output folder that holds something else than an earlier output; a file of the user's is never removed.

    Args:
        out: the folder.
        mark: text that the ``config.json`` of an earlier output holds.
        files: patterns of the names that an output may hold.
        what: name of an earlier output, for the message.

    Raises:
        ValueError: the folder is in use.
    """
    recover(out)
    names = sorted(entry.name for entry in out.iterdir()) if out.is_dir() else []
    config = out / "config.json"
    is_earlier = config.is_file() and mark in config.read_text(encoding="utf-8", errors="replace")
    if (out.exists() and not out.is_dir()) or (names and not is_earlier):
        raise ValueError(f"--out {str(out)!r} exists and is no {what}: choose another folder or remove it")
    foreign = [name for name in names if not any(fnmatch(name, pattern) for pattern in files)]
    if foreign:
        raise ValueError(f"--out {str(out)!r} would be replaced, and holds {foreign[0]!r}: move that file away")


def _is_recorded(out: Path) -> bool:
    try:
        record = json.loads(run_file(out).read_text(encoding="utf-8")) if run_file(out).is_file() else None
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(record, dict) and record.get("output") == out.name


def write_atomic(path: Path, text: str, *, follows_links: bool = True) -> None:
    """Write `text` (UTF-8); `path` holds the whole text, or its earlier content after an error (OSError).

    `follows_links`: as of :func:`replacing`; not for a file that the user has not named.
    """
    if is_stream(path):
        append(path, text)
        return
    with replacing(path, follows_links=follows_links) as new:
        new.write_text(text, encoding="utf-8")


def append(path: Path, text: str) -> None:
    """Add text to the end of a file, complete on disk before this returns, or send the text to a pipe or device."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with path.open("ab") as stream:
            stream.write(text.encode())
            stream.flush()
            if not is_stream(path):
                os.fsync(stream.fileno())
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextlib.contextmanager
def renamed(path: Path) -> Iterator[Path]:
    """A path at which the block writes a file of a cache, which then takes the name ``path``: whole, or not there.

    Cheaper than :func:`replacing`: not forced to the disk, and for one writer at a time.
    """
    new = path.with_suffix(".tmp")
    yield new
    new.replace(path)


@contextlib.contextmanager
def replacing(path: Path, *, follows_links: bool = True) -> Iterator[Path]:
    """A path at which the block writes a file or folder, which then takes the place of `path`.

    An error in the block leaves what stood at `path`. A symbolic link stays, and its end is replaced; without
    `follows_links` the link itself is replaced, as in a cache, where only a stranger makes a link.
    """
    place = path.resolve() if follows_links else path.parent.resolve() / path.name
    place.parent.mkdir(parents=True, exist_ok=True)
    _recover(place)
    with _hidden_folder(place) as hidden:
        new = hidden / _NEW
        yield new
        _force_to_disk(new)
        with locked(place.parent, wait=True):  # two writers of one folder swap one after the other
            if new.is_dir() and (place.is_dir() or place.is_symlink()):
                place.rename(hidden / _OLD)
            new.replace(place)


def recover(path: Path) -> None:
    """Finish the folder swap of a killed process, and remove the temporary files of killed writers."""
    _recover(path.resolve())


def _recover(place: Path) -> None:
    name = re.compile(rf"\.{re.escape(place.name)}\.[^.]+\.tmp")
    try:
        found = [entry for entry in place.parent.iterdir() if name.fullmatch(entry.name)]
    except OSError:
        return  # no such folder, or no right to list the folder
    for hidden in filter(_is_own_folder, found):
        # Wait for a running writer within its swap; leave a writer alone that still writes.
        with locked(hidden, wait=(hidden / _OLD).exists()) as is_locked:
            if is_locked:
                with contextlib.suppress(OSError):  # a reader may have no right to write
                    _clear(hidden, place)


def _is_own_folder(hidden: Path) -> bool:
    """Whether a hidden folder may be one of ours: a stranger may plant links, pipes and folders of the same name."""
    try:
        found = hidden.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


def _clear(hidden: Path, place: Path) -> None:
    """Remove a hidden folder, after the end of a swap that stopped between its renames; Ctrl-C waits for that."""
    try:
        _clear_once(hidden, place)
    except KeyboardInterrupt:
        _clear_once(hidden, place)
        raise


def _clear_once(hidden: Path, place: Path) -> None:
    if (hidden / _OLD).exists():
        with locked(place.parent, wait=True):  # within another writer's swap `place` is missing, which is no kill
            if not place.exists():
                # The old version goes aside only when the new one is whole.
                (hidden / (_NEW if (hidden / _NEW).exists() else _OLD)).rename(place)
            if (hidden / _OLD).exists():
                (hidden / _OLD).rename(hidden / _GONE)  # a half removed folder must not return
    shutil.rmtree(hidden, ignore_errors=True)


@contextlib.contextmanager
def _hidden_folder(place: Path) -> Iterator[Path]:
    """A locked folder beside `place`, removed at the end."""
    while True:
        # Named before it is made: Ctrl-C right after the making finds the name, and removes the folder.
        hidden = place.parent / f".{place.name}.{secrets.token_hex(8)}.tmp"
        try:
            hidden.mkdir(mode=0o700)
            with locked(hidden) as is_locked:
                if is_locked is False:
                    continue  # another process took the folder for an abandoned one before the lock
                try:
                    yield hidden
                finally:
                    _clear(hidden, place)
                return
        except KeyboardInterrupt:
            _clear(hidden, place)
            raise


@contextlib.contextmanager
def locked(
    folder: Path, *, wait: bool = False, seconds: float | None = None, is_shared: bool = False
) -> Iterator[bool | None]:
    """True if this process holds the lock of the folder or file in the block; None on a file system without locks.

    A link is not followed, and a pipe is not waited for: False.

    Args:
        folder: the folder or file, which exists.
        wait: wait while another process holds the lock, and say so.
        seconds: end of the wait; None: a minute.
        is_shared: with other readers.

    Raises:
        TimeoutError: another process has held the lock for too long.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        yield False  # gone, a link, or another user's
        return
    try:
        kind = fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX
        yield _lock(descriptor, folder, kind, wait=wait, most=_LOCK_SECONDS if seconds is None else seconds)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, folder: Path, kind: int, *, wait: bool, most: float) -> bool | None:
    started, is_told = time.monotonic(), False
    while True:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            # Not of a folder that went, or was put in its place, before the lock.
            return folder.exists() and os.path.samestat(os.fstat(descriptor), folder.lstat())
        except BlockingIOError:
            if not wait:
                return False
        except OSError:
            return None
        waited = time.monotonic() - started
        if waited > most:
            raise TimeoutError(f"another process holds the lock of {folder}: end that process, and try again")
        if waited > _LOCK_NOTICE and not is_told:
            is_told = True
            print(f"waiting for another process that holds the lock of {folder}", file=sys.stderr)
        time.sleep(0.01)


def _force_to_disk(new: Path) -> None:
    for file in [entry for entry in new.rglob("*") if entry.is_file()] if new.is_dir() else [new]:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
