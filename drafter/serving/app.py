"""The web application: the OpenAI API's endpoints, health, metrics, a chat page, and the guard in front of them."""

import asyncio
import contextlib
import hashlib
import hmac
from collections.abc import AsyncIterator, Mapping, Sequence
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from drafter.engine.engine import Engine
from drafter.serving.metrics import Metrics
from drafter.serving.options import ServeOptions
from drafter.serving.protocol import ApiError, error_of, server_error, timed_out
from drafter.serving.server import Server
from drafter.serving.stream import CLOSED_BY_CLIENT, STATUS

_PAGE_POLICY = (
    "default-src 'none'; connect-src 'self'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_BODY_SECONDS = 30.0
_LEAST_BODY_BYTES = 2 * 2**20  # largest body, unless the rows are long
_TOKEN_BYTES = 32  # of a body for each token of a row: text has about four, a list of token ids seven
_CLOSE = {"Connection": "close"}  # the rest of the body is not read
_GENERATION_PATHS = ("/v1/completions", "/v1/chat/completions")
_OUTCOME_OF = {401: "unauthorized", 429: "overloaded", 503: "overloaded", 504: "timed_out", CLOSED_BY_CLIENT: "hung_up"}


def create_app(engine: Engine, options: ServeOptions) -> FastAPI:
    """The application around an engine; ``app.state.server`` is its :class:`Server`.

    Args:
        engine: an engine with ``max_model_len``. Only the application may use the engine from now on.
        options: names and limits.

    Raises:
        ValueError: the target has no tokenizer, or the engine has no fixed row size.
    """
    server = Server(engine, options)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await server.start()
        yield
        await server.stop()

    app = FastAPI(title="Drafter", version="1", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.server = server
    max_body_bytes = max(_LEAST_BODY_BYTES, _TOKEN_BYTES * server.max_length)
    app.add_middleware(Guard, api_keys=options.api_keys, max_body_bytes=max_body_bytes, metrics=server.metrics)
    if options.cors_origin:  # the outermost layer, so that pages can read errors as well
        app.add_middleware(CORSMiddleware, allow_origins=options.cors_origin, allow_methods=["*"], allow_headers=["*"])
    _add_error_handlers(app, options.request_timeout)
    _add_endpoints(app, server)
    return app


def _respond(error: ApiError) -> JSONResponse:
    return JSONResponse(error.body, error.status, error.headers)


def _add_error_handlers(app: FastAPI, request_timeout: float) -> None:
    async def on_error(_: Request, error: Exception) -> JSONResponse:
        if isinstance(error, RequestValidationError):
            error = error_of(list(error.errors()))
        elif isinstance(error, HTTPException):
            error = ApiError(error.status_code, str(error.detail), headers=error.headers)
        elif isinstance(error, TimeoutError):
            error = timed_out(request_timeout)
        return _respond(error if isinstance(error, ApiError) else server_error(500, "an internal error"))

    for kind in (ApiError, RequestValidationError, HTTPException, TimeoutError, Exception):
        app.add_exception_handler(kind, on_error)


def _add_endpoints(app: FastAPI, server: Server) -> None:
    page = (files("drafter.serving") / "page.html").read_text(encoding="utf-8")

    app.post("/v1/chat/completions", response_model=None)(server.chat)
    app.post("/v1/completions", response_model=None)(server.complete)
    app.post("/v1/drafter/reload")(server.reload_drafter)

    @app.get("/v1/models")
    async def models() -> Mapping[str, Any]:
        return {"object": "list", "data": [server.model_card]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Mapping[str, Any]:
        if name != server.model.name:
            raise ApiError(404, f"model {name!r} is not served here", param="model", code="model_not_found")
        return server.model_card

    @app.get("/health")
    async def health() -> Response:
        """Liveness: 503 when only a restart helps."""
        is_alive = server.worker.state != "dead"
        return JSONResponse({"status": "ok" if is_alive else "dead"}, 200 if is_alive else 503)

    @app.get("/ready")
    async def ready() -> Response:
        """Readiness: 503 while the server starts and while the server shuts down."""
        state = server.worker.state
        return JSONResponse({"status": state}, 200 if state == "ready" else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(server.metrics.render(), media_type="text/plain; version=0.0.4")

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        return HTMLResponse(page, headers={"Content-Security-Policy": _PAGE_POLICY, "Cache-Control": "no-cache"})


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
        self._digests = [_digest(key.encode()) for key in api_keys]
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
            await _respond(error)(scope, receive, watched)
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
        # All digests have one length and all are compared, so the time reveals nothing about a key.
        given = _digest(key.strip().encode("latin-1"))
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
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


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _replay(body: bytes, receive: Receive) -> Receive:
    """A ``receive`` that returns the body once, and then the client's messages: only a hang-up can follow."""
    waiting = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return waiting.pop() if waiting else await receive()

    return replayed
