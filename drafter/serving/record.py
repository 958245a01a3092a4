"""Recording of finished answers, only when asked: a thread of its own writes, so that no answer waits for a disk."""

import logging
import queue
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

from drafter.engine.request import Request
from drafter.serving.metrics import Metrics
from drafter.utils.traffic import Recorder, traffic_row

_log = logging.getLogger("drafter.serving")
_MAX_WAITING = 1024  # rows that wait for the disk; further rows are dropped


class TrafficLog:
    """Writes finished answers to a folder (:class:`drafter.utils.traffic.Recorder`).

    Args:
        folder: folder of the files.
        max_mib: limit of the folder, in MiB.
        metrics: counters of the server.

    Raises:
        OSError: the folder cannot be made or written to.
    """

    def __init__(self, folder: Path, max_mib: int, metrics: Metrics) -> None:
        self._recorder = Recorder(folder, max_mib)
        self._metrics = metrics
        self._rows: queue.Queue[dict[str, Any] | None] = queue.Queue(_MAX_WAITING)
        self._thread = threading.Thread(target=self._write, name="traffic", daemon=True)
        self._thread.start()
        metrics.is_recording.set(1)
        _log.info(
            "recording answers into %s: token ids and sampling parameters, at most %d MiB; "
            'a request with "record": false is left out',
            folder,
            max_mib,
        )

    def add(self, request: Request) -> None:
        """Record a finished request; any thread may call."""
        try:
            self._rows.put_nowait(traffic_row(request.prompt_ids, request.token_ids, asdict(request.params)))
        except queue.Full:
            self._metrics.unrecorded_answers.inc()

    def close(self) -> None:
        """Write the waiting answers, and end the thread."""
        self._rows.put(None)
        self._thread.join()
        self._recorder.close()

    def _write(self) -> None:
        while (row := self._rows.get()) is not None:
            if self._recorder.add(row):
                self._metrics.recorded_answers.inc()
            self._metrics.is_recording.set(self._recorder.is_on)
