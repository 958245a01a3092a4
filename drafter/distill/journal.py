"""A JSONL file that a run appends to and a later run continues.

Every row is one ``write`` that ends with a line feed, so a killed process leaves at most one incomplete line, the last.
Opening the file removes an incomplete line. A file beside the rows records the settings; a run with other settings is
refused.
"""

import contextlib
import json
import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from reprlib import repr as short
from typing import Any

from drafter.data.reading import read_json_lines
from drafter.utils.fingerprint import same_fingerprint
from drafter.utils.io import locked, write_atomic
from drafter.utils.parse import read_json_object


class Journal:
    """Rows appended to ``path``, with their settings in ``path + ".settings.json"``.

    Args:
        path: the .jsonl file.
        settings: what a later run must agree on.
        keys: keys that every row has, with their types.

    Attributes:
        rows: the rows of the file when it was opened, in order.

    Raises:
        ValueError: the file has other settings, is damaged in the middle, or is open in another run.
        OSError: the file cannot be written, or is a folder, a pipe or a device.
    """

    def __init__(self, path: str | Path, settings: Mapping[str, Any], keys: Mapping[str, type] | None = None) -> None:
        self.path = Path(path).expanduser()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.settings_path = self.path.with_name(self.path.name + ".settings.json")
        # Unbuffered: when `append` returns, the operating system has the row, and the row survives this process.
        self._open = contextlib.ExitStack()
        self._file = self._open.enter_context(self.path.open("ab+", buffering=0))
        try:
            if self._open.enter_context(locked(self.path.resolve())) is False:
                raise ValueError(f"--out {path}: another run is writing this file; give each run its own")
            self._check_settings(json.loads(json.dumps(settings)))
            self._remove_incomplete_line()
            records = list(read_json_lines(self.path, str(self.path)))
            for record in records:
                for name, kind in (keys or {}).items():
                    if not isinstance(record.fields.get(name), kind):
                        raise ValueError(f"{record.where} has no {name}, or one that is no {kind.__name__}")
            self.rows = [record.fields for record in records]
        except BaseException:
            self._open.close()
            raise

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one row; OSError when the disk is full (the next start removes the incomplete line)."""
        data = (json.dumps(row, ensure_ascii=False) + "\n").encode()
        num_written = self._file.write(data)
        if num_written != len(data):
            raise OSError(f"{self.path}: the disk is full; finished rows are kept, run again to continue")

    def close(self) -> None:
        """Flush the rows to the disk, and release and close the file."""
        if not self._file.closed:
            os.fsync(self._file.fileno())
            self._open.close()

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check_settings(self, settings: dict[str, Any]) -> None:
        if self._file.seek(0, os.SEEK_END) == 0:
            text = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
            write_atomic(self.settings_path, text, follows_links=False)
            return
        if not self.settings_path.is_file():
            raise ValueError(
                f"--out {self.path} holds rows but no {self.settings_path.name} lies beside it, so it cannot be "
                "continued: give another --out"
            )
        recorded = read_json_object(self.settings_path)
        for name in {**settings, **recorded}:
            now, then = settings.get(name), recorded.get(name)
            is_same = name == "target_fingerprint" and same_fingerprint(str(now), str(then))
            if now != then and not is_same:
                raise ValueError(
                    f"--out {self.path} was written with {name} = {short(then)}, now it is {short(now)}: use the same "
                    "settings to continue, or another --out"
                )

    def _remove_incomplete_line(self) -> None:
        if size := self._file.seek(0, os.SEEK_END):
            with mmap.mmap(self._file.fileno(), size, access=mmap.ACCESS_READ) as content:
                self._file.truncate(content.rfind(b"\n") + 1)
