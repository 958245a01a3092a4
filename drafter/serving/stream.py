"""Server-sent events: a response that sends chunks until the answer, the client or the deadline ends the stream."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from drafter.serving.protocol import ApiError

_DONE = b"data: [DONE]\n\n"
_KEEP_ALIVE = b": waiting\n\n"  # a comment, which clients skip; proxies keep the connection open
STATUS = "drafter.status"  # key of the ASGI scope: the status of an answer that ended after its first byte
CLOSED_BY_CLIENT = 499  # no standard status; the client has left and reads none


async def is_attended(work: "asyncio.Task[Any]", receive: Receive) -> bool:
    """Wait for the end of the work, or for a client that leaves: False. The body must have been read before."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            continue

    watching = asyncio.create_task(watch())
    try:
        await asyncio.wait({work, watching}, return_when=asyncio.FIRST_COMPLETED)
        return work.done()
    finally:
        watching.cancel()


class EventStream(Response):
    """A response that sends events until they end, the client hangs up, or the deadline passes.

    Args:
        chunks: JSON objects, and None where the client waits; the response closes the generator in every case, so that
            its ``finally`` frees the rows.
        deadline: a time of the event loop's clock.
        late: the last event when the deadline passes.
    """

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncGenerator[dict[str, Any] | None, None], deadline: float, late: ApiError) -> None:
        self.status_code = 200
        self.background = None
        # Proxies must not cache or buffer a stream.
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._chunks = chunks
        self._deadline = deadline
        self._late = late

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response (ASGI)."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        sending = asyncio.create_task(self._send(scope, send))
        try:
            async with asyncio.timeout_at(self._deadline):
                if await is_attended(sending, receive):
                    sending.result()
                else:
                    scope[STATUS] = CLOSED_BY_CLIENT
        except TimeoutError:
            await _cancel(sending)
            # A client that does not read would block this send as well, so the send gets one second.
            with contextlib.suppress(TimeoutError, OSError):
                async with asyncio.timeout(1.0):
                    await _send_error(self._late, scope, send)
        finally:
            await _cancel(sending)

    async def _send(self, scope: Scope, send: Send) -> None:
        try:
            async with contextlib.aclosing(self._chunks) as chunks:
                async for chunk in chunks:
                    data = _KEEP_ALIVE if chunk is None else _event(chunk)
                    await send({"type": "http.response.body", "body": data, "more_body": True})
        except ApiError as error:
            await _send_error(error, scope, send)
        else:
            await send({"type": "http.response.body", "body": _DONE, "more_body": False})


def _event(chunk: dict[str, Any]) -> bytes:
    """One event on one data line; JSON has no raw line breaks."""
    return b"data: " + json.dumps(chunk, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def _send_error(error: ApiError, scope: Scope, send: Send) -> None:
    """The error as the last event, because the status 200 was sent with the first."""
    scope[STATUS] = error.status
    await send({"type": "http.response.body", "body": _event(error.body), "more_body": False})


async def _cancel(task: "asyncio.Task[None]") -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, OSError):
        await task
