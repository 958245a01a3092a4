"""The web application: the OpenAI API's endpoints, health, metrics, and a chat page, around one engine."""

import asyncio
import contextlib
import hashlib
import itertools
import json
import logging
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from importlib.resources import files
from typing import Any
from urllib.parse import urlsplit

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from prometheus_client import generate_latest
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from drafter.engine.engine import Engine
from drafter.engine.request import Request as EngineRequest
from drafter.engine.request import RequestOptions
from drafter.serving.answers import Answer, Model
from drafter.serving.encoder import Encoder
from drafter.serving.follow import Follower
from drafter.serving.guard import CLOSED_BY_CLIENT, STATUS, Guard, respond
from drafter.serving.metrics import Metrics
from drafter.serving.options import ServeOptions
from drafter.serving.protocol import ApiError, ChatRequest, CompletionRequest, Generation, error_of, told
from drafter.serving.record import Recorder
from drafter.serving.worker import Worker
from drafter.targets.chat import Chat
from drafter.utils.io import first_line

_PAGE_POLICY = (
    "default-src 'none'; connect-src 'self'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_log = logging.getLogger("drafter.serving")
_LEAST_BODY_BYTES = 2 * 2**20  # largest body, unless the rows are long
_TOKEN_BYTES = 32  # of a body for each token of a row: text has about four, a list of token ids seven
_SEED_STRIDE = 0x9E3779B97F4A7C15  # odd, so that the seeds of all choices of one request differ


class Server:
    """The state that all endpoints share: worker, encoder, metrics, model card."""

    def __init__(self, engine: Engine, options: ServeOptions) -> None:
        target = engine.target
        if target.tokenizer is None:
            raise ValueError(f"target {target.name!r} has no tokenizer: a server needs a tokenizer")
        assert engine.plan.max_model_len is not None, "the rows of a server have one size"
        self._seconds = options.request_timeout
        self.metrics = Metrics()
        record = options.record
        self._recorder = None if record is None else Recorder(record, options.record_max_mib, self.metrics)
        self.worker = Worker(engine, max_queue=options.max_queue, metrics=self.metrics, recorder=self._recorder)
        fingerprint = "fp_" + hashlib.sha256(target.fingerprint.encode()).hexdigest()[:12]
        self.model = Model(options.served_name, fingerprint, target.tokenizer)
        self.max_length = min(engine.plan.max_model_len, target.max_length)
        self.encoder = Encoder(
            target, options.served_name, self.max_length, escape_special_tokens=options.escape_special_tokens
        )
        self.follower = None
        if options.drafter_used is not None and engine.drafter is not None:
            self.follower = Follower(options.drafter_used, self.worker, self.metrics)
            if options.follow and not self.follower.folder.is_dir():
                raise ValueError(f"--follow watches a folder, and --drafter {options.drafter_used} is none")
        self._follows = options.follow
        self._page = (files("drafter.serving") / "page.html").read_text(encoding="utf-8")
        self._card = {
            "id": self.model.name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "drafter",
            "max_model_len": self.max_length,
            "max_num_seqs": engine.plan.max_num_seqs,
            "speculation": engine.num_nodes > 1,
        }

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """The engine's thread and the tokenizer's process run. At the end open answers fail."""
        async with contextlib.AsyncExitStack() as at_end:
            if self._recorder is not None:
                at_end.push_async_callback(asyncio.to_thread, self._recorder.close)
            at_end.push_async_callback(self.encoder.close)
            await self.encoder.start()
            at_end.push_async_callback(self.worker.stop)
            self.worker.start()
            if self.follower is not None and self._follows:
                at_end.callback(asyncio.create_task(self.follower.follow()).cancel)
            yield

    async def reload_drafter(self) -> dict[str, Any]:
        """Load the drafter's folder again; the drafter in use, and whether it has just taken over."""
        if self.follower is None:
            raise ApiError(400, "this server drafts without a drafter's folder: there is nothing to reload")
        try:
            is_replaced = await self.follower.reload()
        except Exception as error:  # whatever a damaged folder raises
            _log.warning("a reload was refused, and the old drafter stays: %s", first_line(error))
            folder, target = self.follower.folder, self.worker.engine.target.name
            names = {str(folder.resolve()): folder.name, str(folder): folder.name, target: self.model.name}
            message = f"the old drafter stays: {told(error, names)}"
            raise ApiError(409, message, code="drafter_refused") from error
        return {"drafter": self.follower.digest, "replaced": is_replaced}

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        return await self._respond(body, [Chat([turn.plain for turn in body.messages])], request)

    async def complete(self, body: CompletionRequest, request: Request) -> Response:
        """Continue texts."""
        return await self._respond(body, body.prompts, request)

    async def _respond(
        self, body: ChatRequest | CompletionRequest, asked: Sequence[str | Chat | list[int]], request: Request
    ) -> Response:
        if body.model != self.model.name:
            message = f"model {body.model!r} is not served here: use {self.model.name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")
        self.worker.check(len(asked) * body.n)
        late = ApiError(504, f"the answer took longer than {self._seconds:g} seconds", code="timeout")
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._seconds
        try:
            async with asyncio.timeout_at(deadline):
                prompts = [ids if isinstance(ids, list) else await self.encoder.encode(ids) for ids in asked]
        except TimeoutError:
            raise late from None
        answer = Answer(self.model, body, self._requests(body, prompts))
        self.worker.submit(answer)
        with contextlib.ExitStack() as at_end:
            at_end.callback(self.worker.abandon, answer)
            at_end.callback(loop.call_at(deadline, answer.put, late).cancel)
            if body.stream:
                return EventStream(answer, deadline + 1.0, at_end.pop_all().close)
            at_end.callback(asyncio.create_task(_end_when_client_leaves(answer, request)).cancel)
            return JSONResponse(await answer.whole())

    def _requests(self, body: ChatRequest | CompletionRequest, prompts: Sequence[list[int]]) -> list[EngineRequest]:
        """The engine's request of each text; the texts of a prompt differ in the seed (ApiError for a bad prompt)."""
        options = RequestOptions(body.speculation, body.num_logprobs, want_tree=body.details and body.stream)
        make = self.worker.engine.make_request
        places = itertools.product(prompts, range(body.n))
        try:
            params = body.params(self.max_length)
            return [
                make(ids, replace(params, seed=_seed(body, choice)), options, want_text=bool(params.stop))
                for ids, choice in places
            ]
        except ValueError as error:
            code = "context_length_exceeded" if "context" in str(error) else None
            raise ApiError(400, str(error), code=code) from error

    async def models(self) -> dict[str, Any]:
        """The one model, with the digest of the drafter in use."""
        digest = None if self.follower is None else self.follower.digest
        return {"object": "list", "data": [self._card | {"drafter": digest}]}

    async def health(self) -> Response:
        """Liveness: 503 when only a restart helps."""
        is_alive = self.worker.state != "dead"
        return JSONResponse({"status": "ok" if is_alive else "dead"}, 200 if is_alive else 503)

    async def ready(self) -> Response:
        """Readiness: 503 while the server shuts down, and when its engine has failed."""
        return JSONResponse({"status": self.worker.state}, 200 if self.worker.state == "ready" else 503)

    async def render_metrics(self) -> Response:
        """The metrics in the text format of Prometheus."""
        return Response(generate_latest(self.metrics.registry), media_type="text/plain; version=0.0.4")

    async def page(self) -> Response:
        """A page to try the server."""
        return HTMLResponse(self._page, headers={"Content-Security-Policy": _PAGE_POLICY, "Cache-Control": "no-cache"})


async def _end_when_client_leaves(answer: Answer, request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        continue
    answer.put(ApiError(CLOSED_BY_CLIENT, "the client has left"))


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


def _seed(body: Generation, choice: int) -> int:
    """The seed of a choice: the client's, another for each further choice, or a random seed."""
    return secrets.randbits(64) if body.seed is None else (body.seed + choice * _SEED_STRIDE) % 2**64


def create_app(engine: Engine, options: ServeOptions) -> FastAPI:
    """The application around an engine; ``app.state.server`` is its :class:`Server`.

    Args:
        engine: an engine with ``max_model_len``. Only the application may use the engine from now on.
        options: names and limits.

    Raises:
        ValueError: the target has no tokenizer, or ``--follow`` has no folder to watch.
    """
    server = Server(engine, options)
    app = FastAPI(
        title="Drafter", version="1", lifespan=lambda _: server.running(), docs_url=None, redoc_url=None,
        redirect_slashes=False,  # a redirect would name the host that the client named
    )  # fmt: skip
    app.state.server = server
    max_body_bytes = max(_LEAST_BODY_BYTES, _TOKEN_BYTES * server.max_length)
    # A key keeps strangers out; without one, the host does: a web site whose name leads to this machine's address.
    hosts = None
    if not options.api_keys and "*" not in options.cors_origin:
        sites = [urlsplit(origin).hostname or "" for origin in options.cors_origin]
        hosts = {name.lower() for name in ("localhost", options.host, socket.gethostname(), *sites)}
    app.add_middleware(
        Guard, api_keys=options.api_keys, hosts=hosts, max_body_bytes=max_body_bytes, metrics=server.metrics
    )
    if options.cors_origin:  # the outermost layer, so that pages can read errors as well
        app.add_middleware(CORSMiddleware, allow_origins=options.cors_origin, allow_methods=["*"], allow_headers=["*"])
    for kind in (RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, _on_error)
    app.post("/v1/chat/completions", response_model=None)(server.chat)
    app.post("/v1/completions", response_model=None)(server.complete)
    app.post("/v1/drafter/reload")(server.reload_drafter)
    app.get("/v1/models")(server.models)
    app.get("/health")(server.health)
    app.get("/ready")(server.ready)
    app.get("/metrics")(server.render_metrics)
    app.get("/", include_in_schema=False)(server.page)
    return app


async def _on_error(_: Request, error: Exception) -> JSONResponse:
    if isinstance(error, RequestValidationError):
        error = error_of(list(error.errors()))
    elif not isinstance(error, HTTPException):
        error = ApiError(500, "an internal error")
    elif not isinstance(error, ApiError):
        error = ApiError(error.status_code, error.detail, headers=error.headers)
    return respond(error)
