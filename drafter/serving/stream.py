"""Server-sent events: a response that sends chunks until the answer, the client or the deadline ends the stream."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Callable
from typing import Any, Literal

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": waiting\n\n"  # a comment, which clients skip; proxies keep the connection open
OUTCOME = "drafter.outcome"  # key of the ASGI scope under which a response records how the request ended
CLOSED_BY_CLIENT = 499  # no standard status; the client has left and reads none


def event(chunk: dict[str, Any]) -> bytes:
    """One event on one data line; JSON has no raw line breaks."""
    return b"data: " + json.dumps(chunk, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def attend(work: "asyncio.Task[None]", receive: Receive, deadline: float) -> Literal["done", "left", "late"]:
    """Wait for the end of the work, a client that leaves, or the deadline (event loop's clock), whichever comes first.

    The body must have been read before.
    """

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            continue

    watching = asyncio.create_task(watch())
    try:
        timeout = max(0.0, deadline - asyncio.get_running_loop().time())
        await asyncio.wait({work, watching}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        return "done" if work.done() else "left" if watching.done() else "late"
    finally:
        watching.cancel()


class EventStream(Response):
    """A response that sends events until they end, the client hangs up, or the deadline passes.

    Args:
        events: the events; the response closes the generator in every case, so that its ``finally`` frees the rows.
        deadline: a time of the event loop's clock.
        on_timeout: returns the last event when the deadline passes.
        on_hang_up: called when the client leaves before the end.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        deadline: float,
        on_timeout: Callable[[], bytes],
        on_hang_up: Callable[[], None],
    ) -> None:
        self.status_code = 200
        self.background = None
        # Proxies must not cache or buffer a stream.
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._events = events
        self._deadline = deadline
        self._on_timeout = on_timeout
        self._on_hang_up = on_hang_up

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response (ASGI)."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        sending = asyncio.create_task(self._send(send))
        try:
            end = await attend(sending, receive, self._deadline)
            if end == "done":
                sending.result()
            elif end == "left":
                self._on_hang_up()
            else:
                await _cancel(sending)
                # A client that does not read would block this send as well, so the send gets one second.
                with contextlib.suppress(TimeoutError, OSError):
                    async with asyncio.timeout(1.0):
                        await send({"type": "http.response.body", "body": self._on_timeout(), "more_body": False})
        finally:
            await _cancel(sending)

    async def _send(self, send: Send) -> None:
        async with contextlib.aclosing(self._events) as events:
            async for chunk in events:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, OSError):
        await task
