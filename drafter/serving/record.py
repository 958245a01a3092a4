"""Recording of finished answers, only when asked: a thread of its own writes, so that no answer waits for a disk.

A row is one JSON line, token ids and sampling parameters alone:

    {"prompt_token_ids": [1, 5, 9], "token_ids": [7, 7, 2], "temperature": 0.8, "top_k": 0, ..., "seed": 3}
"""

import contextlib
import json
import logging
import os
import queue
import threading
from collections.abc import Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any

from drafter.serving.metrics import Metrics

_log = logging.getLogger("drafter.serving")
_FILE_BYTES = 64 * 2**20
_MAX_WAITING = 1024  # rows that wait for the disk; further rows are dropped


def traffic_row(prompt_ids: Sequence[int], token_ids: Sequence[int], params: Mapping[str, Any]) -> dict[str, Any]:
    """The row of one answer; ``params``: its sampling parameters, of which the client's texts are left out."""
    kept = {name: value for name, value in params.items() if name != "stop"}
    return {"prompt_token_ids": list(prompt_ids), "token_ids": list(token_ids), **kept}


def traffic_files(folder: Path) -> list[Path]:
    """The files of a folder of traffic, the oldest first: their numbers rise, whatever the clock does."""
    return sorted(folder.glob("traffic-*.jsonl"))


class Recorder:
    """Appends rows to the files of a folder, readable by their owner alone.

    A file holds at most 64 MiB or a quarter of the folder's limit. When the folder would exceed the limit, the oldest
    files go. A line is written at once, so that a kill leaves at most the last line of a file torn; a new recorder
    begins a new file. After an error of the disk the recorder logs one line and records nothing more. OSError: the
    folder, which is made for its owner alone, cannot be made or written to.
    """

    def __init__(self, folder: Path, max_mib: int, metrics: Metrics) -> None:
        self._folder, self._metrics = folder, metrics
        self._max_bytes = max_mib * 2**20
        self._file_bytes = min(_FILE_BYTES, self._max_bytes // 4)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._file = self._new_file()
        self._has_failed = False
        self._rows: queue.Queue[Mapping[str, Any] | None] = queue.Queue(_MAX_WAITING)
        self._thread = threading.Thread(target=self._run, name="traffic", daemon=True)
        self._thread.start()
        metrics.is_recording.set(1)
        what = "token ids and sampling parameters"
        out = 'a request with "record": false is left out'
        _log.info("recording answers into %s: %s, at most %d MiB; %s", folder, what, max_mib, out)

    def add(self, row: Mapping[str, Any]) -> None:
        """Record a row; any thread may call."""
        try:
            self._rows.put_nowait(row)
        except queue.Full:
            self._metrics.unrecorded_answers.inc()

    def close(self) -> None:
        """Write the waiting rows, and end the thread."""
        self._rows.put(None)
        self._thread.join()

    def _run(self) -> None:
        for row in iter(self._rows.get, None):
            is_written = self._write(json.dumps(row, separators=(",", ":")).encode() + b"\n")
            (self._metrics.recorded_answers if is_written else self._metrics.unrecorded_answers).inc()
        self._file.close()

    def _write(self, line: bytes) -> bool:
        """Write a line; False where the line is larger than a file, and after an error of the disk."""
        if self._has_failed or len(line) > self._file_bytes:
            return False
        try:
            size = self._file.tell()
            # Another recorder of the folder may have removed this file as the oldest.
            if size + len(line) > self._file_bytes or not os.fstat(self._file.fileno()).st_nlink:
                self._file.close()
                self._file, size = self._new_file(), 0
            if self._file.write(line) < len(line):
                self._file.truncate(size)
                raise OSError("the disk is full")
        except OSError as error:
            _log.warning("recording into %s has ended: %s", self._folder, error.strerror or error)
            self._metrics.is_recording.set(0)
            self._has_failed = True
        return not self._has_failed

    def _new_file(self) -> FileIO:
        """A new file, after the removal of the oldest files that leave no room for the new file."""
        files, sizes = traffic_files(self._folder), {}
        numbers = [file.stem.removeprefix("traffic-") for file in files]
        number = 1 + max((int(number) for number in numbers if number.isdecimal()), default=0)
        for file in files:
            with contextlib.suppress(FileNotFoundError):  # another recorder of the folder may have removed a file
                sizes[file] = file.stat().st_size
        while sizes and sum(sizes.values()) + self._file_bytes > self._max_bytes:
            oldest = next(iter(sizes))
            oldest.unlink(missing_ok=True)
            del sizes[oldest]
        while True:
            path = self._folder / f"traffic-{number:020d}.jsonl"
            with contextlib.suppress(FileExistsError):  # or have taken the number
                return FileIO(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600))
            number += 1
