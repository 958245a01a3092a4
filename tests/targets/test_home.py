"""What is made of files has a key of its own for other bytes, and is made again when a file is damaged."""

import os
import time
from pathlib import Path

import pytest

from drafter.targets.home import is_whole, keep, key_of


def test_other_bytes_places_and_facts_have_another_key(tmp_path: Path) -> None:
    file = tmp_path / "weights.bin"
    file.write_bytes(bytes(4096))
    key = key_of([file], "float32")
    (tmp_path / "link").symlink_to(file)
    assert key == key_of([tmp_path / "link"], "float32") != key_of([file], "bfloat16")
    old = file.stat()
    time.sleep(0.05)  # two changes within one tick of the clock have the same time
    file.write_bytes(b"\x40" + bytes(4095))
    os.utime(file, ns=(old.st_atime_ns, old.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (old.st_size, old.st_mtime_ns)
    assert key_of([file], "float32") != key


@pytest.mark.parametrize("damage", ["cut", "gone", "record"])
def test_a_damaged_folder_is_made_again(tmp_path: Path, damage: str) -> None:
    made = []

    def fill(scratch: Path) -> None:
        made.append(scratch)
        (scratch / "forward.bin").write_bytes(bytes(4096))

    file = keep(tmp_path / "programs", fill) / "forward.bin"
    keep(file.parent, fill)
    assert len(made) == 1
    if damage == "cut":
        file.write_bytes(bytes(4000))
    elif damage == "gone":
        file.unlink()
    else:
        (file.parent / "source.json").write_text("[" * 100_000)
    keep(file.parent, fill)
    assert len(made) == 2 and file.read_bytes() == bytes(4096) and is_whole(file.parent)
