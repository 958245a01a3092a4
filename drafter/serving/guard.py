"""The guard in front of the application: key, type, size and pace of a request, and the count of outcomes."""

import asyncio
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from drafter.serving.metrics import Metrics
from drafter.serving.protocol import ApiError
from drafter.serving.stream import CLOSED_BY_CLIENT, STATUS

_BODY_SECONDS = 30.0
_CLOSE = {"Connection": "close"}  # the rest of the body is not read
_GENERATION_PATHS = ("/v1/completions", "/v1/chat/completions")
_OUTCOME_OF = {401: "unauthorized", 429: "overloaded", 503: "overloaded", 504: "timed_out", CLOSED_BY_CLIENT: "hung_up"}


def respond(error: ApiError) -> JSONResponse:
    """The response of an error."""
    return JSONResponse(error.body, error.status, error.headers)


class Guard:
    """ASGI middleware that checks key, type, size and pace of every request under ``/v1``, and counts outcomes.

    Args:
        app: the application behind the guard.
        api_keys: a request needs one of these keys; without any, no request needs a key.
        max_body_bytes: size limit. The guard refuses a larger body before its end.
        metrics: counters of the server.
    """

    def __init__(self, app: ASGIApp, *, api_keys: Sequence[str], max_body_bytes: int, metrics: Metrics) -> None:
        self._app = app
        self._keys = [key.encode() for key in api_keys]
        self._max_body_bytes = max_body_bytes
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check a request, then call the application."""
        status = 500

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            body = await self._check(scope, receive) if scope["type"] == "http" else None
        except ApiError as error:
            await respond(error)(scope, receive, watched)
        except ClientDisconnect:
            status = CLOSED_BY_CLIENT
        else:
            await self._app(scope, receive if body is None else _replay(body, receive), watched)
        finally:
            if scope["type"] == "http" and scope["path"] in _GENERATION_PATHS and scope["method"] == "POST":
                status = scope.get(STATUS, status)
                other = "completed" if status < 400 else "refused" if status < 500 else "failed"
                self._metrics.requests.labels(_OUTCOME_OF.get(status, other)).inc()

    async def _check(self, scope: Scope, receive: Receive) -> bytes | None:
        """The body of a request to the API; None for a request without a body, or elsewhere.

        Raises:
            ApiError: the key is wrong, or the body is ambiguous, too large, too slow, or not JSON.
            ClientDisconnect: the client left.
        """
        headers = Headers(scope=scope)
        if "content-length" in headers and "transfer-encoding" in headers:
            # A proxy may find another end of the body, and read the rest as a further request.
            message = "the request has both Content-Length and Transfer-Encoding: send one of them"
            raise ApiError(400, message, headers=_CLOSE)
        if not scope["path"].startswith("/v1/"):
            return None
        kind, _, key = headers.get("authorization", "").partition(" ")
        # All keys are compared, each in constant time, so the time reveals nothing of a key but its length.
        given = key.strip().encode("latin-1")
        matches = [hmac.compare_digest(given, own) for own in self._keys]
        if matches and (kind.lower() != "bearer" or not any(matches)):
            message = "the API key is missing or wrong: send it as 'Authorization: Bearer KEY'"
            raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        if scope["method"] != "POST":
            return None
        if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            # A browser sends the forms of other web sites without asking; no form has this content type.
            raise ApiError(415, "the body must be JSON: send 'Content-Type: application/json'")
        too_large = ApiError(
            413, f"the body is larger than {self._max_body_bytes} bytes", code="body_too_large", headers=_CLOSE
        )
        declared = headers.get("content-length", "")
        if declared.isdigit() and int(declared) > self._max_body_bytes:
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(_BODY_SECONDS):
                async for part in Request(scope, receive).stream():
                    body += part
                    if len(body) > self._max_body_bytes:
                        raise too_large
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {_BODY_SECONDS:.0f} seconds", headers=_CLOSE) from None
        return bytes(body)


def _replay(body: bytes, receive: Receive) -> Receive:
    """A ``receive`` that returns the body once, and then the client's messages: only a hang-up can follow."""
    waiting = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return waiting.pop() if waiting else await receive()

    return replayed
