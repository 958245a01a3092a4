"""What is made of files has another key for other bytes, also where size and time are the same."""

import os
import time
from pathlib import Path

from drafter.targets.home import key_of


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
