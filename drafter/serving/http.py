"""HTTP as this server takes it: a limit on slow headers, no ambiguous bodies, protocol errors in the API's shape."""

import asyncio
import json
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from drafter.serving.protocol import ApiError

HEADER_SECONDS = 20.0  # from the first byte, or from the connection's beginning, to the end of a request's headers


class ApiProtocol(H11Protocol):
    """One connection. A connection that has sent no whole headers in time is closed."""

    _header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first request."""
        super().connection_made(transport)
        self._header_timer = self.loop.call_later(HEADER_SECONDS, self._give_up)

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take bytes in, and start or stop the clock of the headers."""
        super().data_received(data)
        self._watch_headers()

    def on_response_complete(self) -> None:
        """Go on with a request whose first bytes came while this one was answered."""
        super().on_response_complete()
        self._watch_headers()

    def _watch_headers(self) -> None:
        is_within_headers = self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0])
        if not is_within_headers:
            self._stop_timer()
        elif self._header_timer is None:
            self._header_timer = self.loop.call_later(HEADER_SECONDS, self._give_up)

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are no HTTP, and close."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._send_error(ApiError(400, "the request is no valid HTTP/1.1"))
        self.transport.close()

    def _give_up(self) -> None:
        self._header_timer = None
        if self.conn.our_state is h11.IDLE and self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            self._send_error(ApiError(408, f"the headers did not arrive within {HEADER_SECONDS:g} seconds"))
        self.transport.close()

    def _send_error(self, error: ApiError) -> None:
        body = json.dumps(error.body).encode()
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        events: list[Any] = [h11.Response(status_code=error.status, headers=headers), h11.Data(data=body)]
        for event in [*events, h11.EndOfMessage()]:
            self.transport.write(self.conn.send(event) or b"")

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None
