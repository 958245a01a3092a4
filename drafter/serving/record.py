"""Recording of finished answers, only when asked: a thread of its own writes, so that no answer waits for a disk."""

import json
import logging
import os
import queue
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drafter.serving.metrics import Metrics
from drafter.utils.traffic import traffic_files

_log = logging.getLogger("drafter.serving")
_FILE_BYTES = 64 * 2**20
_MAX_WAITING = 1024  # rows that wait for the disk; further rows are dropped


class Recorder:
    """Appends rows to the files of a folder, readable by their owner alone.

    A file holds at most 64 MiB or a quarter of the folder's limit. When the folder would exceed the limit, the oldest
    files go. A line is written at once, so that a kill leaves at most the last line of a file torn; a new recorder
    begins a new file. After an error of the disk the recorder logs one line and records nothing more.

    Args:
        folder: made for its owner alone, if missing.
        max_mib: limit of the folder's files of traffic, in MiB.
        metrics: counters of the server.

    Raises:
        OSError: the folder cannot be made or written to.
    """

    def __init__(self, folder: Path, max_mib: int, metrics: Metrics) -> None:
        self._folder = folder
        self._metrics = metrics
        self._max_bytes = max_mib * 2**20
        self._file_bytes = min(_FILE_BYTES, self._max_bytes // 4)
        self._file: int | None = None
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._begin_file()
        self._rows: queue.Queue[Mapping[str, Any] | None] = queue.Queue(_MAX_WAITING)
        self._thread = threading.Thread(target=self._run, name="traffic", daemon=True)
        self._thread.start()
        metrics.is_recording.set(1)
        _log.info(
            "recording answers into %s: token ids and sampling parameters, at most %d MiB; "
            'a request with "record": false is left out',
            folder,
            max_mib,
        )

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
        try:
            while (row := self._rows.get()) is not None:
                line = json.dumps(row, separators=(",", ":")).encode() + b"\n"
                if len(line) > self._file_bytes:
                    self._metrics.unrecorded_answers.inc()
                    continue
                self._write(line)
                self._metrics.recorded_answers.inc()
        except OSError as error:
            _log.warning("recording into %s has ended: %s", self._folder, error.strerror or error)
            self._metrics.is_recording.set(0)
            while self._rows.get() is not None:
                continue
        assert self._file is not None
        os.close(self._file)

    def _write(self, line: bytes) -> None:
        assert self._file is not None
        # Another recorder of the folder may have removed this file as the oldest.
        if self._size + len(line) > self._file_bytes or not os.fstat(self._file).st_nlink:
            self._begin_file()
        written = os.write(self._file, line)
        if written < len(line):  # the disk is full
            os.ftruncate(self._file, self._size)
            raise OSError("there is no room for a row")
        self._size += written

    def _begin_file(self) -> None:
        """Begin a file, after the removal of the oldest files that leave no room for the new file."""
        files = traffic_files(self._folder)
        num_bytes = sum(map(_size_of, files))
        for file in files:
            if num_bytes + self._file_bytes <= self._max_bytes:
                break
            num_bytes -= _size_of(file)
            file.unlink(missing_ok=True)
        path = self._folder / f"traffic-{time.time_ns():020d}.jsonl"
        new = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        if self._file is not None:
            os.close(self._file)
        self._file, self._size = new, 0


def _size_of(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0  # another recorder has removed the file
