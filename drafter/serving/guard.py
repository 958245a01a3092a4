"""Guard: checks a request before anything reads it (key; kind, size and pace of the body) and counts how it ended."""

import asyncio
import hashlib
import hmac
import json
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from drafter.serving.metrics import Metrics
from drafter.serving.protocol import ApiError

OUTCOME = "drafter.outcome"  # key of the ASGI scope under which a stream tells how it ended
CLOSED_BY_CLIENT = 499  # no standard status: nobody is there to read it

_BODY_SECONDS = 30.0
_GENERATION_PATHS = ("/v1/completions", "/v1/chat/completions")
_OUTCOME_OF = {401: "unauthorized", 429: "overloaded", 503: "overloaded", 504: "timed_out", CLOSED_BY_CLIENT: "hung_up"}


class Guard:
    """ASGI middleware in front of everything under ``/v1``.

    Args:
        app: what is guarded.
        api_keys: any of them opens; none: open to all.
        max_body_bytes: larger bodies are refused without reading them to the end.
        metrics: where requests are counted.
    """

    def __init__(self, app: ASGIApp, *, api_keys: Sequence[str], max_body_bytes: int, metrics: Metrics) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in api_keys]
        self._max_body_bytes = max_body_bytes
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check, then pass on."""
        if scope["type"] == "http" and _header(scope, b"content-length") and _header(scope, b"transfer-encoding"):
            # A proxy in front may see another end of the body, and so another next request.
            error = ApiError(400, "the request has both Content-Length and Transfer-Encoding: send one of them")
            await _send_error(error, send, closes=True)
            return
        if scope["type"] != "http" or not scope["path"].startswith("/v1/"):
            await self._app(scope, receive, send)
            return
        status = 500

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            try:
                self._check_key(scope)
                body = await self._read_body(scope, receive) if scope["method"] == "POST" else None
            except ApiError as error:
                await _send_error(error, watched)
            except ConnectionError:
                status = CLOSED_BY_CLIENT
            else:
                await self._app(scope, receive if body is None else _replay(body, receive), watched)
        finally:
            if scope["path"] in _GENERATION_PATHS and scope["method"] == "POST":
                outcome = scope.get(OUTCOME) or _OUTCOME_OF.get(status)
                if outcome is None:
                    outcome = "completed" if status < 400 else "refused" if status < 500 else "failed"
                self._metrics.requests.labels(outcome).inc()

    def _check_key(self, scope: Scope) -> None:
        if not self._digests:
            return
        kind, _, key = _header(scope, b"authorization").partition(b" ")
        # Digests have one length and all are compared, so that the time tells nothing about a key.
        given = _digest(key.strip())
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        if kind.lower() != b"bearer" or not any(matches):
            raise ApiError(
                401, "the API key is missing or wrong: send it as 'Authorization: Bearer KEY'", code="invalid_api_key"
            )

    async def _read_body(self, scope: Scope, receive: Receive) -> bytes:
        """The whole body, within the limits.

        Raises:
            ApiError: too large, too slow, or not JSON.
            ConnectionError: the client left.
        """
        kind = _header(scope, b"content-type").partition(b";")[0].strip().lower()
        if kind != b"application/json":
            # Also keeps forms of other web sites out, which a browser would send without asking.
            raise ApiError(415, "the body must be JSON: send 'Content-Type: application/json'")
        declared = _header(scope, b"content-length")
        if declared.isdigit() and int(declared) > self._max_body_bytes:
            raise self._too_large()
        parts, size = [], 0
        try:
            async with asyncio.timeout(_BODY_SECONDS):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ConnectionError
                    part = message.get("body", b"")
                    size += len(part)
                    if size > self._max_body_bytes:
                        raise self._too_large()
                    parts.append(part)
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {_BODY_SECONDS:.0f} seconds") from None

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self._max_body_bytes} bytes", code="body_too_large")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _header(scope: Scope, name: bytes) -> bytes:
    return next((value for key, value in scope["headers"] if key == name), b"")


def _replay(body: bytes, receive: Receive) -> Receive:
    """The body that was read, once; then whatever comes (only a hang-up can)."""
    is_first = True

    async def replayed() -> Message:
        nonlocal is_first
        if is_first:
            is_first = False
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return replayed


async def _send_error(error: ApiError, send: Send, *, closes: bool = False) -> None:
    body = json.dumps(error.body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(name.lower().encode(), value.encode()) for name, value in error.headers.items()]
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if closes or error.status in (408, 413):
        headers.append((b"connection", b"close"))  # the rest of the body is not read
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
