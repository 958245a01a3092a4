"""Output files and folders that are whole or not there, and the first line of an error.

A version is written into a hidden folder beside its place, ``.NAME.RANDOM.tmp``, which its writer keeps locked. Then a
file is renamed over the old one. A folder cannot be: the old one is renamed into the hidden folder, the new one is
renamed in, the hidden folder is removed. A kill between the two renames leaves both versions in the hidden folder, and
:func:`recover` finishes the swap at the next start.
"""

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

_NEW, _OLD, _GONE = "new", "old", "gone"  # the versions in a hidden folder
_STREAMS = ("/dev/stdout", "/dev/stderr", "/dev/fd/", "/proc/self/fd/")  # regular files where the shell redirects
_LOCK_NOTICE, _SWAP_SECONDS = 1.0, 60.0  # a wait for a lock says so, and ends; any reader of a folder may hold its lock


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or the first two if a colon ends it; the error's type where it has no text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1]) if lines else type(error).__name__


def printable(text: str, length: int = 300) -> str:
    """The text in one line of at most ``length`` characters; U+FFFD stands for what a terminal would obey."""
    line = " ".join(text.split())
    shown = "".join(char if char.isprintable() else "\ufffd" for char in line[: length + 1])
    return shown if len(shown) <= length else shown[:length] + " ..."


def escaped(text: str) -> str:
    """The text with its line feeds and tabs; what else a terminal would obey is written as ``\\x1b``."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def is_stream(path: Path) -> bool:
    """Whether `path` is a pipe, a device or a standard stream: written to, never replaced, without a run record."""
    return (path.exists() and not path.is_file() and not path.is_dir()) or str(path).startswith(_STREAMS)


def write_atomic(path: Path, text: str, *, follows_links: bool = True) -> None:
    """Write `text` (UTF-8), or leave what stands at `path` (OSError); `follows_links` is that of :func:`replacing`."""
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
def replacing(path: Path, *, follows_links: bool = True) -> Iterator[Path]:
    """A path at which the block writes a file or folder, which then takes the place of `path`.

    An error in the block leaves what stood at `path`. The end of a symbolic link is replaced; without `follows_links`
    the link itself, as of a file that the user has not named, where only a stranger makes a link.
    """
    place = path.resolve() if follows_links else path.parent.resolve() / path.name
    place.parent.mkdir(parents=True, exist_ok=True)
    recover(place, follows_links=False)
    with hidden_folder(place) as hidden:
        new = hidden / _NEW
        yield new
        for file in new.rglob("*") if new.is_dir() else [new]:
            if file.is_file():
                with file.open("rb") as stream:
                    os.fsync(stream.fileno())
        with locked(place.parent, seconds=_SWAP_SECONDS):  # two writers of one folder swap one after the other
            if new.is_dir() and (place.is_dir() or place.is_symlink()):
                place.rename(hidden / _OLD)
            new.replace(place)


def recover(path: Path, *, follows_links: bool = True) -> None:
    """Finish the folder swap of a killed process, and remove the temporary files of killed writers."""
    place = path.resolve() if follows_links else path
    name = re.compile(rf"\.{re.escape(place.name)}\.[^.]+\.tmp")
    try:
        # A stranger may plant links, pipes and folders of the same name.
        with os.scandir(place.parent) as entries:
            found = [Path(entry) for entry in entries if name.fullmatch(entry.name) and _is_own_folder(entry)]
    except OSError:
        return  # no such folder, or no right to list the folder
    for hidden in found:
        # Wait for a running writer within its swap; leave a writer alone that still writes.
        with locked(hidden, seconds=_SWAP_SECONDS if (hidden / _OLD).exists() else 0) as is_locked:
            if is_locked:
                with contextlib.suppress(OSError):  # a reader may have no right to write
                    _clear(hidden, place)


def _is_own_folder(entry: os.DirEntry[str]) -> bool:
    with contextlib.suppress(FileNotFoundError):  # its writer is done
        return entry.is_dir(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_uid == os.geteuid()
    return False


def _clear(hidden: Path, place: Path) -> None:
    """Remove a hidden folder, after the end of a swap that stopped between its renames."""
    if (hidden / _OLD).exists():
        with locked(place.parent, seconds=_SWAP_SECONDS):  # within another writer's swap `place` is missing
            if not place.exists():
                # The old version goes aside only when the new one is whole.
                (hidden / (_NEW if (hidden / _NEW).exists() else _OLD)).rename(place)
            if (hidden / _OLD).exists():
                (hidden / _OLD).rename(hidden / _GONE)  # a half removed folder must not return
    shutil.rmtree(hidden, ignore_errors=True)


@contextlib.contextmanager
def hidden_folder(place: Path) -> Iterator[Path]:
    """A locked folder beside `place`, removed at the end."""
    while True:
        # Named before it is made: Ctrl-C right after the making finds the name, and removes the folder.
        hidden = place.parent / f".{place.name}.{secrets.token_hex(8)}.tmp"
        try:
            try:
                hidden.mkdir(mode=0o700)
                with locked(hidden) as is_locked:
                    if is_locked is not False:  # else another process took the folder for an abandoned one
                        yield hidden
                        return
            finally:
                _clear(hidden, place)
        except KeyboardInterrupt:
            _clear(hidden, place)  # the first one may have been interrupted
            raise


@contextlib.contextmanager
def locked(path: Path, *, seconds: float = 0) -> Iterator[bool | None]:
    """Whether this process holds the lock of the folder or file in the block; None on a file system without locks.

    A link is not followed, and a pipe is not waited for: False. ``seconds``: how long to wait, and say so, while
    another process holds the lock, before TimeoutError; without them the block runs with False.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        yield False  # gone, a link, or another user's
        return
    try:
        yield _lock(descriptor, path, seconds)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, path: Path, seconds: float) -> bool | None:
    started, is_told = time.monotonic(), False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Not of a folder that went, or was put in its place, before the lock.
            return path.exists() and os.path.samestat(os.fstat(descriptor), path.lstat())
        except BlockingIOError:
            if not seconds:
                return False
        except OSError:
            return None
        waited = time.monotonic() - started
        if waited > seconds:
            raise TimeoutError(f"another process holds the lock of {path}: end that process, and try again")
        if waited > _LOCK_NOTICE and not is_told:
            is_told = True
            print(f"waiting for another process that holds the lock of {path}", file=sys.stderr)
        time.sleep(0.01)
