"""The web application: the OpenAI API's endpoints, health, metrics and a page to try it all."""

import contextlib
from collections.abc import AsyncIterator, Mapping
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, JSONResponse, Response

from drafter.engine.engine import Engine
from drafter.serving.guard import Guard
from drafter.serving.protocol import ApiError, ChatRequest, CompletionRequest, ErrorBody, error_of
from drafter.serving.server import Server, ServerSettings

_Responses = dict[int | str, dict[str, Any]]
_ERRORS: _Responses = {status: {"model": ErrorBody} for status in (400, 401, 404, 408, 413, 415, 429, 500, 503, 504)}
_STREAM: _Responses = {200: {"content": {"application/json": {}, "text/event-stream": {}}}}
_PAGE_POLICY = (
    "default-src 'none'; connect-src 'self'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def create_app(engine: Engine, settings: ServerSettings) -> FastAPI:
    """The application around an engine; ``app.state.server`` is its :class:`Server`.

    Args:
        engine: with ``max_length`` set; nobody else may use it from now on.
        settings: names and limits.

    Raises:
        ValueError: the target has no tokenizer, or the engine no fixed row size.
    """
    server = Server(engine, settings)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await server.start()
        yield
        await server.stop()

    app = FastAPI(title="Drafter", version="1", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.server = server
    app.add_middleware(
        Guard, api_keys=settings.api_keys, max_body_bytes=settings.max_body_bytes, metrics=server.metrics
    )
    if settings.cors_origins:  # outermost, so that errors are readable for pages as well
        app.add_middleware(
            CORSMiddleware, allow_origins=settings.cors_origins, allow_methods=["*"], allow_headers=["*"]
        )
    _add_error_handlers(app)
    _add_generation(app, server)
    _add_rest(app, server)
    return app


def _add_error_handlers(app: FastAPI) -> None:
    def respond(error: ApiError) -> JSONResponse:
        return JSONResponse(error.body, error.status, error.headers)

    @app.exception_handler(ApiError)
    async def on_api_error(_: Request, error: ApiError) -> JSONResponse:
        return respond(error)

    @app.exception_handler(RequestValidationError)
    async def on_invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        return respond(error_of(list(error.errors())))

    @app.exception_handler(HTTPException)
    async def on_http_error(_: Request, error: HTTPException) -> JSONResponse:
        response = respond(ApiError(error.status_code, str(error.detail)))
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(TimeoutError)
    async def on_timeout(_: Request, error: TimeoutError) -> JSONResponse:
        return respond(ApiError(504, "the request took too long", kind="server_error", code="timeout"))

    @app.exception_handler(Exception)
    async def on_error(_: Request, error: Exception) -> JSONResponse:
        return respond(ApiError(500, "an internal error", kind="server_error"))


def _add_generation(app: FastAPI, server: Server) -> None:
    @app.post("/v1/chat/completions", response_model=None, responses=_ERRORS | _STREAM)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        return await server.chat(body, request)

    @app.post("/v1/completions", response_model=None, responses=_ERRORS | _STREAM)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await server.complete(body, request)


def _add_rest(app: FastAPI, server: Server) -> None:
    page = (files("drafter.serving") / "page.html").read_text(encoding="utf-8")

    @app.get("/v1/models", responses={401: _ERRORS[401]})
    async def models() -> Mapping[str, Any]:
        return {"object": "list", "data": [server.model_card]}

    @app.get("/v1/models/{name:path}", responses={401: _ERRORS[401], 404: _ERRORS[404]})
    async def model(name: str) -> Mapping[str, Any]:
        if name != server.settings.model_name:
            raise ApiError(404, f"model {name!r} is not served here", param="model", code="model_not_found")
        return server.model_card

    @app.get("/health", responses={503: {}})
    async def health() -> Response:
        """Alive: 503 when only a restart helps. ``tokenization`` is ``stuck`` while one text holds up the others."""
        is_alive = server.worker.state != "dead"
        status = {"status": "ok" if is_alive else "dead", "tokenization": server.encoder.state}
        return JSONResponse(status, 200 if is_alive else 503)

    @app.get("/ready", responses={503: {}})
    async def ready() -> Response:
        """Ready for requests: 503 while starting and while shutting down."""
        state = server.worker.state
        return JSONResponse({"status": state}, 200 if state == "ready" else 503)

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        return Response(server.metrics.render(), media_type="text/plain; version=0.0.4")

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def index() -> Response:
        return HTMLResponse(page, headers={"Content-Security-Policy": _PAGE_POLICY, "Cache-Control": "no-cache"})
