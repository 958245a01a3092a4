"""Digests of files are remembered for as long as a file is the same, and no longer."""

import hashlib
import os
import time
from pathlib import Path

import pytest

from drafter.targets import home
from drafter.targets.home import sha256_of
from drafter.targets.openvino_files import _FORMAT, is_intact, keep


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of its own; a file is settled after a fiftieth of a second."""
    monkeypatch.setenv("DRAFTER_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(home, "_TICK", 0.02)
    return tmp_path


def remembered(file: Path, data: bytes) -> str:
    """The digest of a new file, which a second call takes from the memory."""
    file.write_bytes(data)
    time.sleep(0.1)
    digest = sha256_of(file)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hashlib, "file_digest", None)
        assert sha256_of(file) == digest == hashlib.sha256(data).hexdigest()
    return digest


def change(file: Path, data: bytes) -> None:
    """Other bytes of the same size and time."""
    old = file.stat()
    file.write_bytes(data)
    os.utime(file, ns=(old.st_atime_ns, old.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (old.st_size, old.st_mtime_ns)


def test_other_bytes_of_the_same_size_and_time_have_another_digest(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = folder / "weights.bin"
    digest = remembered(file, bytes(4096))
    change(file, b"\x40" + bytes(4095))
    assert sha256_of(file) != digest
    monkeypatch.setattr(home, "_TICK", 60.0)  # a file that has just changed is not remembered
    records = list((folder / "home" / "sums").iterdir())
    file.write_bytes(b"new")
    assert sha256_of(file) == hashlib.sha256(b"new").hexdigest()
    assert list((folder / "home" / "sums").iterdir()) == records


def test_a_damaged_memory_is_made_again_and_a_link_in_its_place_is_replaced(folder: Path) -> None:
    digest = remembered(folder / "one.bin", b"1")
    (record,) = (folder / "home" / "sums").iterdir()
    for damage in (b"{", b"\xff" * 64, digest[:62].encode()):
        record.write_bytes(damage)
        assert sha256_of(folder / "one.bin") == digest == record.read_text()
    (folder / "mine.txt").write_text("years of work")
    record.unlink()
    record.symlink_to(folder / "mine.txt")
    assert sha256_of(folder / "one.bin") == digest == record.read_text()
    assert (folder / "mine.txt").read_text() == "years of work"


@pytest.mark.parametrize("damage", ["byte", "cut", "gone", "record"])
def test_damaged_programs_are_made_again_also_after_their_digests_were_remembered(folder: Path, damage: str) -> None:
    """And programs of earlier releases are deleted."""
    earlier = folder / "openvino" / "0304f1aace24771f6f0f876b"
    earlier.mkdir(parents=True)
    place, made = folder / "openvino" / _FORMAT / "programs", []

    def write(scratch: Path) -> None:
        made.append(scratch)
        (scratch / "forward.bin").write_bytes(bytes(4096))

    keep(place, write)
    time.sleep(0.1)
    assert is_intact(place) and not earlier.exists()
    file = place / "forward.bin"
    if damage == "byte":
        change(file, b"\x01" + bytes(4095))
    elif damage == "cut":
        file.write_bytes(bytes(4000))
    elif damage == "gone":
        file.unlink()
    else:
        (place / "files.json").write_text("[" * 100_000)
    keep(place, write)
    assert len(made) == 2 and file.read_bytes() == bytes(4096) and is_intact(place)
