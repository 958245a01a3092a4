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
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from importlib.resources import files
from typing import Any, TypeVar
from urllib.parse import urlsplit

from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from prometheus_client import generate_latest
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from drafter.decoding.params import SamplingParams
from drafter.engine.engine import Engine
from drafter.engine.request import Request as EngineRequest
from drafter.engine.request import RequestOptions
from drafter.serving.answers import Answer, Model
from drafter.serving.editors import InfillAnswer, InfillRequest
from drafter.serving.encoder import Encoder
from drafter.serving.follow import Follower
from drafter.serving.guard import CLOSED_BY_CLIENT, STATUS, Guard, respond
from drafter.serving.metrics import Metrics
from drafter.serving.options import ServeOptions
from drafter.serving.protocol import ApiError, Body, ChatRequest, CompletionRequest, Generation, parsed, told
from drafter.serving.record import Recorder
from drafter.serving.tools import ToolParser, has_marks, structure_of_call
from drafter.serving.worker import Worker
from drafter.targets.chat import Chat
from drafter.utils.io import first_line

_PAGE_POLICY = (
    "default-src 'none'; connect-src 'self'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_log = logging.getLogger("drafter.serving")
_Result = TypeVar("_Result")
_Asked = str | Chat | list[int] | Callable[[], Coroutine[Any, Any, list[int]]]  # a prompt, token ids, or a finder
_NO_INFILL = "has no tokens for filling in the middle"
_LEAST_BODY_BYTES = 2 * 2**20  # largest body, unless the rows are long
_TOKEN_BYTES = 32  # of a body for each token of a row: text has about four, a list of token ids seven
_SMALL_BODY = 1 << 16  # bytes
_BODY_VALUES = 1 << 14  # of a body, besides two for each token of a row
_MOST_LOGPROBS = 1 << 17  # of a whole answer, which is 10 MB of JSON
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
        self._template = str(target.tokenizer.chat_template or "")
        self._vocabulary = target.tokenizer.get_vocab()
        self._has_marks = has_marks(self._template)
        self._thread = ThreadPoolExecutor(1, "json")
        self._page = (files("drafter.serving") / "page.html").read_text(encoding="utf-8")
        own = {"id": self.model.name, "object": "model", "created": int(time.time()), "owned_by": "drafter"}
        rows = {"max_model_len": self.max_length, "max_num_seqs": engine.plan.max_num_seqs}
        self._card = own | rows | {"speculation": engine.num_nodes > 1, "method": engine.plan.method}

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
            raise ApiError(409, f"the old drafter stays: {told(error, names)}", code="drafter_refused") from error
        return {"drafter": self.follower.digest, "replaced": is_replaced}

    async def chat(self, request: Request) -> Response:
        """Answer a conversation."""
        body = await self._read(request, ChatRequest)
        tools = body.callable_tools
        if tools and self._has_marks is None:
            message = f"the chat template of {self.model.name!r} takes no tools: leave them out"
            raise ApiError(400, message, param="tools")
        return await self._respond(body, [Chat([turn.plain for turn in body.messages], tools)], request)

    async def complete(self, request: Request) -> Response:
        """Continue texts."""
        body = await self._read(request, CompletionRequest)
        if not body.suffix:
            return await self._respond(body, body.prompts, request)
        if self.encoder.infill is None:
            raise ApiError(400, f"{self.model.name!r} {_NO_INFILL}: leave suffix out", param="suffix")
        if not all(isinstance(prompt, str) for prompt in body.prompts):
            raise ApiError(400, "suffix needs prompts of text, not of token ids", param="suffix")
        asked = [partial(self.encoder.encode_infill, str(prompt), body.suffix) for prompt in body.prompts]
        return await self._respond(body, asked, request, self.encoder.infill.ends)

    async def infill(self, request: Request) -> Response:
        """Fill in the middle, as llama.cpp's editors ask for it."""
        body = await self._read(request, InfillRequest)
        if self.encoder.infill is None:
            raise ApiError(501, f"{self.model.name!r} {_NO_INFILL}: serve a model for code, such as Qwen2.5-Coder")
        room = self.max_length - (body.max_tokens or 1)
        prefix = body.input_prefix + body.prompt
        extra = [(each.filename, each.text) for each in body.input_extra]
        asked = [partial(self.encoder.encode_infill, prefix, body.input_suffix, extra, room)]
        return await self._respond(body, asked, request, self.encoder.infill.ends)

    async def _read(self, request: Request, kind: type[Body]) -> Body:
        try:
            raw = await request.body()
        except ClientDisconnect:
            raise ApiError(CLOSED_BY_CLIENT, "the client has left") from None
        parse = partial(parsed, raw, kind, _BODY_VALUES + 2 * self.max_length)
        # A large body takes up to half a second: one at a time, beside the event loop.
        return parse() if len(raw) < _SMALL_BODY else await self._in_order(parse)

    async def _in_order(self, call: Callable[[], _Result]) -> _Result:
        """A call that takes a while, on the thread for such calls, after those that came before."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    async def _respond(
        self, body: Generation, asked: Sequence[_Asked], request: Request, ends: tuple[int, ...] = ()
    ) -> Response:
        """Answer prompts; ``ends``: further tokens that end an answer."""
        if body.model:
            self._check_name(body.model)
        late = ApiError(504, f"the answer took longer than {self._seconds:g} seconds", code="timeout")
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._seconds
        try:
            async with asyncio.timeout_at(deadline):
                with self.worker.hold(len(asked) * body.n):
                    prompts = await _while_client_waits(request, self._encode(asked))
                    predicted: list[int] = []
                    if body.predicted:
                        encoding = self.encoder.encode((body.predicted,), "prediction")
                        predicted = await _while_client_waits(request, encoding)
        except TimeoutError:
            raise late from None
        requests = self._requests(body, await self._params(body, ends), prompts, predicted)
        kind = InfillAnswer if isinstance(body, InfillRequest) else Answer
        answer = kind(self.model, body, requests, self._parser(body))
        self.worker.submit(answer)
        with contextlib.ExitStack() as at_end:
            at_end.callback(self.worker.abandon, answer)
            at_end.callback(loop.call_at(deadline, answer.put, late).cancel)
            if body.stream:
                return EventStream(answer, deadline + 1.0, at_end.pop_all().close)
            await _while_client_waits(request, answer.wait())
            render = partial(answer.whole, JSONResponse)
            return await self._in_order(render) if body.num_logprobs is not None else render()

    async def _encode(self, asked: Sequence[_Asked]) -> list[list[int]]:
        calls = [partial(self.encoder.encode, each) if isinstance(each, str | Chat) else each for each in asked]
        return [each if isinstance(each, list) else await each() for each in calls]

    def _parser(self, body: Generation) -> Callable[[], ToolParser] | None:
        """Makes what finds calls in the texts of a request with tools."""
        if not (isinstance(body, ChatRequest) and body.callable_tools):
            return None
        names = {tool["function"]["name"] for tool in body.callable_tools}
        return partial(ToolParser, names, marks=bool(self._has_marks))

    async def _params(self, body: Generation, ends: tuple[int, ...]) -> SamplingParams:
        """The engine's parameters, without a seed. What the answer must look like is compiled beside the event loop."""
        required = body.callable_tools if isinstance(body, ChatRequest) and body.tool_choice != "auto" else []
        try:
            params = body.params(self.max_length)
            if required:
                form = partial(structure_of_call, required, self._template, self._vocabulary)
                params = replace(params, **await self._in_order(form))
            if params.structure is not None:
                await asyncio.to_thread(self.worker.engine.grammars.guide, params)
        except ValueError as error:
            param = "response_format" if body.structured_outputs is None else "structured_outputs"
            raise ApiError(400, str(error), param="tools" if required else param) from error
        return replace(params, stop_token_ids=(*params.stop_token_ids, *ends))

    def _requests(
        self, body: Generation, params: SamplingParams, prompts: Sequence[list[int]], predicted: Sequence[int]
    ) -> list[EngineRequest]:
        """The engine's request of each text; the texts of a prompt differ in the seed (ApiError for a bad prompt)."""
        options = RequestOptions(body.speculation, body.num_logprobs, body.details and body.stream, tuple(predicted))
        make = partial(self.worker.engine.make_request, options=options, want_text=bool(params.stop))
        try:
            requests = [
                make(ids, replace(params, seed=_seed(body, choice)))
                for ids, choice in itertools.product(prompts, range(body.n))
            ]
        except ValueError as error:
            code = "context_length_exceeded" if "context" in str(error) else None
            param = "messages" if isinstance(body, ChatRequest) else "prompt"
            raise ApiError(400, str(error), param=param, code=code) from error
        if body.num_logprobs is not None and not body.stream:
            num_numbers = (1 + body.num_logprobs) * sum(request.limit for request in requests)
            if num_numbers > _MOST_LOGPROBS:
                message = f"the answer may have {num_numbers} log-probabilities, more than {_MOST_LOGPROBS}"
                mend = "lower max_tokens, n or the number of alternatives, or set stream to true"
                raise ApiError(400, f"{message}: {mend}", param="logprobs")
        return requests

    async def models(self) -> dict[str, Any]:
        """The one model, with the digest of the drafter in use."""
        return {"object": "list", "data": [await self.card(self.model.name)]}

    async def card(self, name: str) -> dict[str, Any]:
        """The model of this name."""
        self._check_name(name)
        return self._card | {"drafter": None if self.follower is None else self.follower.digest}

    def _check_name(self, name: str) -> None:
        if name != self.model.name:
            message = f"model {name!r} is not served here: use {self.model.name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

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


async def _while_client_waits(request: Request, work: Coroutine[Any, Any, _Result]) -> _Result:
    """The result of the work, which ends when its client leaves (ApiError)."""

    async def wait_for_end() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            continue

    doing, end = asyncio.create_task(work), asyncio.create_task(wait_for_end())
    try:
        await asyncio.wait((doing, end), return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise ApiError(CLOSED_BY_CLIENT, "the client has left")
        return doing.result()
    finally:
        doing.cancel()
        end.cancel()


class EventStream(StreamingResponse):
    """Server-sent events, until the answer ends, the client leaves, or the event loop's clock shows the deadline.

    ``on_end`` is called at the end, whatever ends the stream.
    """

    media_type = "text/event-stream"

    def __init__(self, answer: Answer, deadline: float, on_end: Callable[[], None]) -> None:
        # Proxies must not cache or buffer a stream.
        super().__init__(self._events(answer), headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._deadline, self._on_end = deadline, on_end
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
            yield answer.end_of_stream


def _event(chunk: dict[str, Any]) -> bytes:
    """One event on one data line; JSON has no raw line breaks."""
    return b"data: " + json.dumps(chunk, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def _seed(body: Generation, choice: int) -> int:
    """The seed of a choice: the client's, another for each further choice, or a random seed."""
    return secrets.randbits(64) if body.seed is None else (body.seed + choice * _SEED_STRIDE) % 2**64


def create_app(engine: Engine, options: ServeOptions) -> FastAPI:
    """The application around an engine with ``max_model_len``, which nobody else may use from now on. Its
    ``state.server`` is the :class:`Server` (ValueError: a target without tokenizer, or no folder for ``--follow``).
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
    for kind in (HTTPException, Exception):
        app.add_exception_handler(kind, _on_error)
    app.post("/v1/chat/completions", response_model=None)(server.chat)
    app.post("/v1/completions", response_model=None)(server.complete)
    app.post("/infill", response_model=None)(server.infill)
    app.post("/v1/drafter/reload")(server.reload_drafter)
    app.get("/v1/models")(server.models)
    app.get("/v1/models/{name:path}")(server.card)
    for path, answer in (("/health", server.health), ("/ready", server.ready)):
        app.api_route(path, methods=["GET", "HEAD"])(answer)
    app.get("/metrics")(server.render_metrics)
    app.get("/", include_in_schema=False)(server.page)
    return app


async def _on_error(_: Request, error: Exception) -> JSONResponse:
    if not isinstance(error, HTTPException):
        error = ApiError(500, "an internal error")
    elif not isinstance(error, ApiError):
        error = ApiError(error.status_code, error.detail, headers=error.headers)
    return respond(error)
