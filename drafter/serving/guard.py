"""The guard in front of the application: key, type and size of a request, and the count of outcomes."""

import hmac
import ipaddress
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from drafter.serving.metrics import Metrics
from drafter.serving.protocol import ApiError
from drafter.utils.io import printable

STATUS = "drafter.status"  # key of the ASGI scope: how a stream ended, after its status 200 was sent
CLOSED_BY_CLIENT = 499  # no standard status; the client has left and reads none
_CLOSE = {"Connection": "close"}  # the rest of the body is not read
_GENERATION_PATHS = ("/v1/completions", "/v1/chat/completions", "/infill")
_OUTCOME_OF = {401: "unauthorized", 429: "overloaded", 503: "overloaded", 504: "timed_out", CLOSED_BY_CLIENT: "hung_up"}


def respond(error: ApiError) -> JSONResponse:
    """The response of an error."""
    return JSONResponse(error.body, error.status_code, error.headers)


@dataclass
class Guard:
    """ASGI middleware: checks the host of every request, key, type and size of those to the API, and counts outcomes.

    A request needs one of the ``api_keys``, if there are any. ``hosts`` (None: any name) are this server's names, in
    lower case: a page of any other web site whose name leads to this server's address would read answers as its own.
    """

    app: ASGIApp
    api_keys: Sequence[str]
    hosts: Collection[str] | None
    max_body_bytes: int
    metrics: Metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check a request, then call the application."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status, num_bytes = 500, 0
        too_large = ApiError(
            413, f"the body is larger than {self.max_body_bytes} bytes", code="body_too_large", headers=_CLOSE
        )

        async def limited() -> Message:
            nonlocal num_bytes
            message = await receive()
            if message["type"] == "http.disconnect":
                scope[STATUS] = CLOSED_BY_CLIENT
            num_bytes += len(message.get("body", b""))
            if num_bytes > self.max_body_bytes:
                raise too_large
            return message

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            headers = Headers(scope=scope)
            self._check(scope, headers)
            if int(headers.get("content-length", 0)) > self.max_body_bytes:
                raise too_large  # before the body, which curl then keeps: a close with unread bytes loses the answer
        except ApiError as error:
            await respond(error)(scope, receive, watched)
        else:
            await self.app(scope, limited, watched)
        finally:
            if scope["path"] in _GENERATION_PATHS and scope["method"] == "POST":
                status = scope.get(STATUS, status)
                other = "completed" if status < 400 else "refused" if status < 500 else "failed"
                self.metrics.requests.labels(_OUTCOME_OF.get(status, other)).inc()

    def _check(self, scope: Scope, headers: Headers) -> None:
        """ApiError for another host or an ambiguous body; for a wrong key or another type of body, but at probes."""
        host = headers.get("host", "")
        if not self._is_own(host):
            message = f"this server is not {printable(host, 100)!r}: use its address, or set a key (--api-key)"
            raise ApiError(403, message, code="wrong_host", headers=_CLOSE)
        if "content-length" in headers and "transfer-encoding" in headers:
            # A proxy may find another end of the body, and read the rest as a further request.
            message = "the request has both Content-Length and Transfer-Encoding: send one of them"
            raise ApiError(400, message, headers=_CLOSE)
        if not scope["path"].startswith(("/v1/", "/infill", "/openapi.json")):
            return
        kind, _, key = headers.get("authorization", "").partition(" ")
        # All keys are compared, each in constant time, so the time reveals nothing of a key but its length.
        given = key.strip().encode("latin-1")
        matches = [hmac.compare_digest(given, own.encode()) for own in self.api_keys]
        if matches and (kind.lower() != "bearer" or not any(matches)):
            message = "the API key is missing or wrong: send it as 'Authorization: Bearer KEY'"
            raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
        if scope["method"] == "POST" and content_type != "application/json":
            # A browser sends the forms of other web sites without asking; no form has this content type.
            raise ApiError(415, "the body must be JSON: send 'Content-Type: application/json'")

    def _is_own(self, host: str) -> bool:
        """Whether ``host:port`` is a name of this server or a numeric address, which no site can claim."""
        try:
            name = urlsplit(f"//{host}").hostname
            return not name or self.hosts is None or name in self.hosts or bool(ipaddress.ip_address(name))
        except ValueError:
            return False
