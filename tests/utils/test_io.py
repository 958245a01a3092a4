"""Outputs are whole or not there, whatever stands in their place and whenever a writer is killed."""

import errno
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from drafter.utils import io
from drafter.utils.io import append, is_stream, recover, replacing, write_atomic
from drafter.utils.provenance import check_output, write_run_record


def hidden(folder: Path) -> list[str]:
    return [entry.name for entry in folder.iterdir() if entry.name.startswith(".")]


def write_folder(place: Path, text: str) -> None:
    with replacing(place) as new:
        new.mkdir()
        for name in ("one", "two"):
            (new / name).write_text(text)


def content(folder: Path) -> set[str]:
    assert {entry.name for entry in folder.iterdir()} == {"one", "two"}
    return {entry.read_text() for entry in folder.iterdir()}


def test_a_file_is_replaced_whole_and_a_failed_write_leaves_the_old_one(tmp_path: Path) -> None:
    place = tmp_path / "new folder" / "out.txt"
    write_atomic(place, "old")
    with pytest.raises(KeyError), replacing(place) as new:
        new.write_text("half")
        raise KeyError
    assert place.read_text() == "old"
    write_atomic(place, "neu")
    assert place.read_text() == "neu" and not hidden(place.parent)


def test_what_stands_at_the_place(tmp_path: Path) -> None:
    """No file replaces a folder, links are followed, devices and pipes are written to."""
    (tmp_path / "out").mkdir()
    with pytest.raises(IsADirectoryError):
        write_atomic(tmp_path / "out", "text")
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    write_atomic(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text() == "new" and not hidden(tmp_path)
    assert is_stream(Path("/dev/null")) and is_stream(Path("/dev/stdout")) and not is_stream(Path("/dev/shm"))
    for write in (write_atomic, append):
        with pytest.raises(OSError, match="/dev/full"):
            write(Path("/dev/full"), "no room")
    pipe, found = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: found.append(pipe.read_text()))
    reader.start()
    check_output(pipe)
    write_atomic(pipe, "through")
    reader.join(10)
    assert found == ["through"] and pipe.is_fifo()


@pytest.mark.parametrize(("call", "left"), [("Path.rename", "old"), ("Path.replace", "new"), ("io._clear", "new")])
def test_a_kill_within_a_swap_is_mended_at_the_next_start(tmp_path: Path, call: str, left: str) -> None:
    """A process kills itself at each of the three moments around the two renames."""
    place = tmp_path / "drafter"
    write_folder(place, "old")
    script = f"""
import os, signal
from tests.utils.test_io import Path, io, write_folder
{call} = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
write_folder(Path({str(place)!r}), "new")
"""
    done = subprocess.run([sys.executable, "-c", script], check=False)
    assert done.returncode == -signal.SIGKILL
    assert len(hidden(tmp_path)) == 1
    recover(place)
    assert content(place) == {left}
    assert not hidden(tmp_path)


def test_a_living_writer_and_another_output_are_left_alone(tmp_path: Path) -> None:
    with replacing(tmp_path / "a") as first, replacing(tmp_path / "a.b") as other:
        recover(tmp_path / "a")
        first.write_text("1")
        other.write_text("2")
    assert (tmp_path / "a").read_text() == "1" and (tmp_path / "a.b").read_text() == "2"
    left = tmp_path / ".a.b.123.tmp"  # of a killed run
    left.mkdir()
    recover(tmp_path / "a")
    assert left.exists()
    recover(tmp_path / "a.b")
    assert not left.exists()


def test_writers_at_once_leave_one_whole_folder(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        written = pool.map(lambda number: write_folder(tmp_path / "out", str(number)), range(40))
    assert list(written) == [None] * 40, "a writer's error is raised"
    recover(tmp_path / "out")
    assert len(content(tmp_path / "out")) == 1 and not hidden(tmp_path)


def test_links_in_place_of_files_that_no_user_has_named_are_replaced(tmp_path: Path) -> None:
    """A stranger who may write into a cache or a run's folder plants them."""
    far = tmp_path / "far"
    far.mkdir()
    for name in ("file", "out.run.json"):
        (far / name).write_text("old")
        (tmp_path / name).symlink_to(far / name)
    (tmp_path / "folder").symlink_to(far)
    write_atomic(tmp_path / "file", "new", follows_links=False)
    write_run_record(tmp_path / "out.jsonl")
    with replacing(tmp_path / "folder", follows_links=False) as new:
        new.mkdir()
    assert {path.name: path.read_text() for path in far.iterdir()} == {"file": "old", "out.run.json": "old"}
    assert (tmp_path / "file").read_text() == "new" and not any(path.is_symlink() for path in tmp_path.iterdir())
    assert not hidden(tmp_path) and not list((tmp_path / "folder").iterdir())


def test_no_locks_on_the_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(io.fcntl, "flock", refuse)
    (tmp_path / ".out.123.tmp").mkdir()  # perhaps another process's: kept
    write_atomic(tmp_path / "out", "text")
    assert (tmp_path / "out").read_text() == "text" and hidden(tmp_path) == [".out.123.tmp"]


def test_what_a_stranger_plants_beside_an_output_is_not_followed(tmp_path: Path) -> None:
    """Links to folders with the names of versions, and a pipe, whose opening would wait for ever."""
    victim, shop = tmp_path / "victim", tmp_path / "shop"
    for name in ("old", "new"):
        (victim / name).mkdir(parents=True)
    shop.mkdir()
    (shop / ".out.link.tmp").symlink_to(victim)
    os.mkfifo(shop / ".out.pipe.tmp")
    os.mkfifo(shop / "out.run.json")
    recover(shop / "out")
    write_atomic(shop / "out", "text")
    with pytest.raises(ValueError, match="no earlier run wrote it"):
        check_output(shop / "out")
    assert sorted(path.name for path in victim.iterdir()) == ["new", "old"]
    with io.locked(shop / ".out.link.tmp") as is_locked:
        assert is_locked is False


def test_a_wait_for_a_lock_says_so_and_ends(tmp_path: Path, monkeypatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Any reader of a folder may hold its lock."""
    monkeypatch.setattr(io, "_LOCK_NOTICE", 0.0)
    monkeypatch.setattr(io, "_SWAP_SECONDS", 0.1)
    write_folder(tmp_path / "out", "old")
    with io.locked(tmp_path), pytest.raises(TimeoutError, match="holds the lock"):
        write_folder(tmp_path / "out", "new")
    assert capfd.readouterr().err.count("waiting for another process") == 1
    assert content(tmp_path / "out") == {"old"} and not hidden(tmp_path)
