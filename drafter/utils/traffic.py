"""Recorded traffic: one JSON line for each answer, token ids and sampling parameters alone.

    {"prompt_token_ids": [1, 5, 9], "token_ids": [7, 7, 2], "temperature": 0.8, "top_k": 0, ..., "seed": 3}

A recorder writes files ``traffic-*.jsonl`` that sort by age, readable by their owner alone. A line is written at once,
so that a kill leaves at most the last line of a file torn; a new recorder begins a new file.
"""

import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PROMPT_IDS, ANSWER_IDS = "prompt_token_ids", "token_ids"  # keys of every row of traffic, whoever wrote the row
MAX_MIB = 1024  # default size of a folder

_log = logging.getLogger("drafter.traffic")
_FILE_BYTES = 64 * 2**20
_TEXT_FIELDS = ("stop",)  # sampling parameters that hold a client's text


def traffic_row(prompt_ids: Sequence[int], token_ids: Sequence[int], params: Mapping[str, Any]) -> dict[str, Any]:
    """The row of one answer; ``params``: its sampling parameters, of which the texts are left out."""
    kept = {name: value for name, value in params.items() if name not in _TEXT_FIELDS}
    return {PROMPT_IDS: list(prompt_ids), ANSWER_IDS: list(token_ids), **kept}


def traffic_files(folder: Path) -> list[Path]:
    """The files of a folder of traffic, the oldest first."""
    return sorted(folder.glob("traffic-*.jsonl"))


class Recorder:
    """Appends rows to the files of a folder. Only one thread may use a recorder.

    A file holds at most 64 MiB or a quarter of the folder's limit. When the folder would exceed the limit, the oldest
    files go. After an error of the disk the recorder logs one line and records nothing more.

    Args:
        folder: made for its owner alone, if missing.
        max_mib: limit of the folder's files of traffic, in MiB.

    Attributes:
        is_on: False after an error of the disk.

    Raises:
        OSError: the folder cannot be made or written to.
    """

    def __init__(self, folder: Path, max_mib: int = MAX_MIB) -> None:
        self.is_on = True
        self._folder = folder
        self._max_bytes = max_mib * 2**20
        self._file_bytes = min(_FILE_BYTES, self._max_bytes // 4)
        self._file: int | None = None
        self._size = 0
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._begin_file()

    def add(self, row: Mapping[str, Any]) -> bool:
        """Append a row; False if the row was not recorded."""
        line = json.dumps(row, separators=(",", ":")).encode() + b"\n"
        if self.is_on and len(line) <= self._file_bytes:
            try:
                self._write(line)
                return True
            except OSError as error:
                _log.warning("recording into %s has ended: %s", self._folder, error.strerror or error)
                self.is_on = False
                self.close()
        return False

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _write(self, line: bytes) -> None:
        # Another recorder of the folder may have removed this file as the oldest.
        if self._file is None or self._size + len(line) > self._file_bytes or not os.fstat(self._file).st_nlink:
            self._begin_file()
        assert self._file is not None
        written = os.write(self._file, line)
        if written < len(line):  # the disk is full
            os.ftruncate(self._file, self._size)
            raise OSError("there is no room for a row")
        self._size += written

    def _begin_file(self) -> None:
        """Begin a file, after the removal of the oldest files that leave no room for the new file."""
        self.close()
        files = traffic_files(self._folder)
        num_bytes = sum(map(_size_of, files))
        for file in files:
            if num_bytes + self._file_bytes <= self._max_bytes:
                break
            num_bytes -= _size_of(file)
            file.unlink(missing_ok=True)
        path = self._folder / f"traffic-{time.time_ns():020d}.jsonl"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._size = 0


def _size_of(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0  # another recorder has removed the file
