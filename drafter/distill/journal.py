"""A JSONL file that a run appends to and a later run continues.

Every row is one ``write`` that ends with a line feed, so a killed process leaves at most one incomplete line, the last.
Opening the file removes an incomplete line. A file beside the rows records the settings; a run with other settings is
refused.
"""

import json
import mmap
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from reprlib import repr as short
from typing import Any, NamedTuple

from drafter.data.reading import read_json_lines
from drafter.utils.fingerprint import same_fingerprint
from drafter.utils.io import locked, write_atomic
from drafter.utils.parse import read_json_object


class Journal(NamedTuple):
    """An open file of rows; ``rows`` are those that it held when it was opened, in order."""

    file: FileIO
    rows: list[dict[str, Any]]

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one row; OSError when the disk is full (the next start removes the incomplete line)."""
        data = (json.dumps(row, ensure_ascii=False) + "\n").encode()
        if self.file.write(data) != len(data):
            raise OSError(f"{self.file.name}: the disk is full; finished rows are kept, run again to continue")


@contextmanager
def open_journal(path: str | Path, settings: Mapping[str, Any], keys: Mapping[str, type]) -> Iterator[Journal]:
    """The journal of the .jsonl file ``path``, with its settings, which a later run must agree on, in ``path +
    ".settings.json"``. ``keys``: what every row has, with the types.

    Raises:
        ValueError: the file has other settings, is damaged in the middle, or is open in another run.
        OSError: the file cannot be written, or is a folder, a pipe or a device.
    """
    path = Path(path).expanduser()
    path.parent.mkdir(parents=True, exist_ok=True)
    # Unbuffered: when `append` returns, the operating system has the row, and the row survives this process.
    with path.open("ab+", buffering=0) as file, locked(path.resolve()) as is_locked:
        if is_locked is False:
            raise ValueError(f"--out {path}: another run is writing this file; give each run its own")
        size = file.seek(0, os.SEEK_END)
        place = path.with_name(path.name + ".settings.json")
        plain = json.loads(json.dumps(settings))
        if not size:
            write_atomic(place, json.dumps(settings, indent=2, ensure_ascii=False) + "\n", follows_links=False)
        elif not place.is_file():
            raise ValueError(
                f"--out {path} holds rows but no {place.name} lies beside it, so it cannot be continued: give another "
                "--out"
            )
        recorded = read_json_object(place)
        for name in {**plain, **recorded}:
            now, then = plain.get(name), recorded.get(name)
            is_same = name == "target_fingerprint" and same_fingerprint(str(now), str(then))
            if now != then and not is_same:
                raise ValueError(
                    f"--out {path} was written with {name} = {short(then)}, now it is {short(now)}: use the same "
                    "settings to continue, or another --out"
                )
        if size:
            with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as content:
                file.truncate(content.rfind(b"\n") + 1)
        records = list(read_json_lines(path, str(path)))
        for record in records:
            for name, kind in keys.items():
                if not isinstance(record.fields.get(name), kind):
                    raise ValueError(f"{record.where} has no {name}, or one that is no {kind.__name__}")
        try:
            yield Journal(file, [record.fields for record in records])
        finally:
            os.fsync(file.fileno())
