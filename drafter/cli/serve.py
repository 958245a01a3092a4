"""`drafter serve`: load a target and serve over HTTP."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator

from drafter.serving.options import ServeOptions


def serve(options: ServeOptions) -> int:
    """Run `drafter serve`."""
    with _ending_at_once():
        from drafter.serving.listen import bind, listen, load_engine

        socket = bind(options.host, options.port)  # before the slow loading, so that a taken port is reported at once
        with socket:
            return listen(socket, load_engine(options), options)


@contextlib.contextmanager
def _ending_at_once() -> Iterator[None]:
    """SIGTERM and Ctrl-C end the process with code 0 until the server sets its own handlers."""

    def end(number: int, _: object) -> None:
        # Not by an exception: a library could catch the exception, and Python would wait for threads that read files.
        os.write(2, f"drafter: told to stop ({signal.Signals(number).name}) before the server was up\n".encode())
        os._exit(0)

    if threading.current_thread() is not threading.main_thread():  # other threads may not set handlers
        yield
        return
    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
