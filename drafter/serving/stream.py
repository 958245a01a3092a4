"""Responses that end when the client leaves: whole answers, and server-sent events."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from drafter.serving.answers import Answer
from drafter.serving.protocol import ApiError

STATUS = "drafter.status"  # key of the ASGI scope: how a stream ended, after its status 200 was sent
CLOSED_BY_CLIENT = 499  # no standard status; the client has left and reads none

_Result = TypeVar("_Result")


async def unless_client_leaves(work: Coroutine[Any, Any, _Result], receive: Receive) -> _Result | None:
    """The result of the work; None where the client leaves first. The body must have been read before."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            continue

    working, watching = asyncio.create_task(work), asyncio.create_task(watch())
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        watching.cancel()


class EventStream(StreamingResponse):
    """Server-sent events, until the answer ends or the client leaves.

    Args:
        answer: sends its chunks.
        deadline: when the stream ends whatever its client reads, by the event loop's clock.
        on_end: called at the end, whatever ends the stream.
    """

    media_type = "text/event-stream"

    def __init__(self, answer: Answer, deadline: float, on_end: Callable[[], None]) -> None:
        # Proxies must not cache or buffer a stream.
        super().__init__(self._events(answer), headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._deadline = deadline
        self._on_end = on_end
        self._status = CLOSED_BY_CLIENT  # until the end of the chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response (ASGI)."""
        try:
            # A client that does not read blocks the sending of the last event as well.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(self._deadline):
                    await super().__call__(scope, receive, send)
        finally:
            scope[STATUS] = self._status
            self._on_end()

    async def _events(self, answer: Answer) -> AsyncIterator[bytes]:
        try:
            async for chunk in answer.chunks():
                yield _event(chunk)
        except ApiError as error:
            self._status = error.status_code
            yield _event(error.body)  # as the last event, because the status 200 was sent with the first
        else:
            self._status = self.status_code
            yield b"data: [DONE]\n\n"


def _event(chunk: dict[str, Any]) -> bytes:
    """One event on one data line; JSON has no raw line breaks."""
    return b"data: " + json.dumps(chunk, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
