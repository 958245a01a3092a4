"""A new drafter takes over while the server answers: loaded beside the old one, and swapped between two steps."""

import asyncio
import logging
import os
from pathlib import Path

from drafter.engine.loading import load_drafter
from drafter.engine.tuned import fingerprint_of_weights
from drafter.models.files import WEIGHTS
from drafter.serving.metrics import Metrics
from drafter.serving.worker import Worker
from drafter.utils.io import first_line

_log = logging.getLogger("drafter.serving")
_POLL_SECONDS = 1.0
_LOAD_SECONDS = 300.0


class Follower:
    """Loads the drafter again when its folder was replaced; an error leaves the old drafter. For the event loop alone.

    ``folder`` is watched. ``digest``: hash of the weights in use.
    """

    def __init__(self, name: str, worker: Worker, metrics: Metrics) -> None:
        self._name, self._worker, self._metrics = name, worker, metrics
        self.folder = Path(name).expanduser()
        self._lock = asyncio.Lock()
        self._seen = self._stamp()
        drafter = worker.engine.drafter
        assert drafter is not None
        self._config = drafter.config
        self.digest = fingerprint_of_weights(drafter)
        metrics.drafter.info({"digest": self.digest})

    async def follow(self) -> None:
        """Watch the folder until the task is cancelled."""
        while True:
            await asyncio.sleep(_POLL_SECONDS)
            if self._stamp() not in (None, self._seen):
                try:
                    await self.reload()
                except Exception as error:  # whatever a damaged folder raises
                    _log.warning("%s was replaced, and the old drafter stays: %s", self.folder, first_line(error))

    async def reload(self) -> bool:
        """Load the drafter again, and let it take over if its weights or its config differ; False if neither does.
        ValueError: the drafter is damaged or does not fit, or its folder changed within the load. OSError: its folder
        cannot be read, or not in time (TimeoutError).
        """
        async with self._lock:
            self._seen = self._stamp()
            loading = asyncio.to_thread(load_drafter, self._name, self._worker.engine.target)
            try:
                drafter = await asyncio.wait_for(loading, _LOAD_SECONDS)
            except TimeoutError as error:  # a read of a broken disk may never return
                message = f"the drafter's files could not be read within {_LOAD_SECONDS:g} seconds"
                raise TimeoutError(message) from error
            if self._seen != self._stamp():
                raise ValueError("the drafter's folder changed while it was read: reload when its writer is done")
            digest = await asyncio.to_thread(fingerprint_of_weights, drafter)
            if digest == self.digest and drafter.config == self._config:
                return False
            await self._worker.replace_drafter(drafter)
            _log.info("drafter %s has taken over from %s", digest, self.digest)
            self.digest, self._config = digest, drafter.config
            self._metrics.drafter_swaps.inc()
            self._metrics.drafter.info({"digest": digest})
            return True

    def _stamp(self) -> list[tuple[int, int, int]] | None:
        """What tells one version of the folder from another; None while there is none."""
        try:
            found = [os.stat(self.folder / name) for name in ("config.json", WEIGHTS)]
        except OSError:
            return None
        return [(stat.st_ino, stat.st_mtime_ns, stat.st_size) for stat in found]
