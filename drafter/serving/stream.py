"""Server-sent events: chunks as they come, and the end of it when the client hangs up or time is up."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Callable
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": waiting\n\n"  # a comment, which clients skip: proxies see that the connection lives


def event(chunk: dict[str, Any]) -> bytes:
    """One event: JSON has no raw line breaks, so it is a single data line."""
    return b"data: " + json.dumps(chunk, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def hung_up(receive: Receive) -> None:
    """Return when the client has closed the connection (the body must have been read)."""
    while (await receive())["type"] != "http.disconnect":
        continue


class EventStream(Response):
    """Sends events until they end, the client hangs up, or the deadline passes.

    Args:
        events: what to send; closed in every case, so that its ``finally`` frees the rows.
        deadline: time of the event loop's clock, or None.
        on_timeout: the last event when time is up.
        on_hang_up: told when the client left before the end.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        deadline: float | None,
        on_timeout: Callable[[], bytes],
        on_hang_up: Callable[[], None],
    ) -> None:
        self.status_code = 200
        self.background = None
        # Proxies must neither store nor collect a stream.
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._events = events
        self._deadline = deadline
        self._on_timeout = on_timeout
        self._on_hang_up = on_hang_up

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        sending = asyncio.create_task(self._send(send))
        watching = asyncio.create_task(hung_up(receive))
        try:
            timeout = None if self._deadline is None else max(0.0, self._deadline - asyncio.get_running_loop().time())
            await asyncio.wait({sending, watching}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
            elif watching.done():
                self._on_hang_up()
            else:
                await _cancel(sending)
                # A client that does not read would block this send as well: it gets a moment.
                with contextlib.suppress(TimeoutError, OSError):
                    async with asyncio.timeout(1.0):
                        await send({"type": "http.response.body", "body": self._on_timeout(), "more_body": False})
        finally:
            await _cancel(sending)
            await _cancel(watching)

    async def _send(self, send: Send) -> None:
        async with contextlib.aclosing(self._events) as events:
            async for chunk in events:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, OSError):
        await task
