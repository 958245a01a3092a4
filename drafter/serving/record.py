"""Recording of finished answers, only when asked: a thread of its own writes, so that no answer waits for a disk."""

import contextlib
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
_MOST_WAITING = 1024  # answers that wait for the disk; further answers are not recorded
_CLOSE_SECONDS = 10.0


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
        self._rows: queue.Queue[dict[str, Any] | None] = queue.Queue(_MOST_WAITING)
        self._thread = threading.Thread(target=self._run, name="traffic", daemon=True)
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
        with contextlib.suppress(queue.Full):
            self._rows.put_nowait(traffic_row(request.prompt_ids, request.token_ids, asdict(request.params)))

    def close(self) -> None:
        """Write the waiting answers, and end the thread."""
        with contextlib.suppress(queue.Full):
            self._rows.put(None, timeout=_CLOSE_SECONDS)
        self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        while (row := self._rows.get()) is not None:
            if self._recorder.add(row):
                self._metrics.recorded_answers.inc()
            self._metrics.is_recording.set(self._recorder.is_on)
        self._recorder.close()
