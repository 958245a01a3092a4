"""The server process: engine, socket, HTTP, signals, and exit code."""

import asyncio
import contextlib
import faulthandler
import logging
import os
import signal
import socket as sockets
from collections.abc import Sequence
from dataclasses import replace

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from drafter.decoding.params import SamplingParams
from drafter.engine.engine import Engine
from drafter.engine.runner import available_bytes
from drafter.engine.settings import Plan
from drafter.serving.app import Server, create_app
from drafter.serving.guard import respond
from drafter.serving.options import DEFAULT_CONTEXT, ServeOptions
from drafter.serving.protocol import ApiError
from drafter.targets.target import Target
from drafter.utils.io import first_line

_log = logging.getLogger("drafter.serving")
_WARM_UP = SamplingParams(max_new_tokens=4, ignore_eos=True)
_WARM_UP_PROMPT = 40  # tokens: more than a step has, so that a long prompt meets no new kernel
_LOOPBACK = ("127.", "::1", "localhost")
_LEAST_CONTEXT = 1024  # tokens of a row, at least, where memory is short
_DRAIN_PAUSE = 0.02  # seconds
_END_SECONDS = 20.0  # from the end of the drain to the end of the process, whatever its threads do
REQUEST_SECONDS = 30  # for a request to arrive
UNREAD_SECONDS = 60  # that a client may leave an answer unread


def load_engine(options: ServeOptions) -> Engine:
    """The engine of a server, which has generated its first tokens (ValueError: no model can be loaded, the cache does
    not fit into memory, or the engine failed).
    """
    # oneDNN keeps 1,024 kernels by shape, and a busy server meets new shapes for many minutes. 128 are as fast.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")  # read at oneDNN's first product
    target, drafter, draft_model = options.load_models()
    if target.tokenizer is not None:
        target.encode("")  # its fork would keep the pages of a cache that is there already
    most = options.max_model_len or _longest([target, *filter(None, [draft_model])], options)
    engine = Engine(target, drafter, replace(options, max_model_len=most), draft_model=draft_model)
    engine.grammars.prepare()
    length = min(most, target.max_length)
    engine.reserve(length + engine.num_nodes)
    prompt = [0] * max(1, min(_WARM_UP_PROMPT, length - _WARM_UP.max_new_tokens))
    try:
        engine.generate([prompt], _WARM_UP)  # kernels are loaded before the first client
    except Exception as error:
        message = f"the engine failed at its first tokens: {type(error).__name__}: {first_line(error)}"
        raise ValueError(message) from error
    engine.forget()
    return engine


def _longest(models: Sequence[Target], options: ServeOptions) -> int:
    """Tokens of a row where none are given: the target's context, or as much of it as fits into memory."""
    num_rows, length = options.max_num_seqs or Plan.max_num_seqs, models[0].max_length
    free = available_bytes(models[0].device)
    if free is None or not models[0].traits.is_uniform:
        return min(length, DEFAULT_CONTEXT)
    # Halves of halves: rows that are larger than needed take memory from everything else.
    while length > _LEAST_CONTEXT and sum(model.runtime.cache_bytes(num_rows, length) for model in models) > free / 2:
        length = max(_LEAST_CONTEXT, length // 2)
    if length < models[0].max_length:
        message = "rows of %d tokens: half of the free memory holds no longer ones; --max-model-len goes up to %d"
        _log.info(message, length, models[0].max_length)
    return length


def bind(host: str, port: int) -> sockets.socket:
    """A bound socket that does not listen yet (OSError: the address is taken, or none of this machine)."""
    socket = sockets.socket(sockets.AF_INET6 if ":" in host else sockets.AF_INET)
    socket.setsockopt(sockets.SOL_SOCKET, sockets.SO_REUSEADDR, 1)
    try:
        socket.bind((host, port))
    except OSError as error:
        socket.close()
        message = f"cannot listen on {host}, port {port}: {error.strerror}; give another --host or --port"
        raise OSError(message) from error
    return socket


def listen(socket: sockets.socket, engine: Engine, options: ServeOptions) -> int:
    """Serve until a signal or a failure of the engine; return the exit code, 0 or 1."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.INFO)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    _log.info("drafting: %s", engine.plan.reason)
    app = create_app(engine, options)
    config = uvicorn.Config(
        app, log_config=None, access_log=False, log_level="warning", server_header=False, http=ApiProtocol,
        timeout_keep_alive=20, lifespan="off",
    )  # fmt: skip
    host, port = socket.getsockname()[:2]
    if not options.api_keys and not host.startswith(_LOOPBACK):
        _log.warning("every client that reaches %s can use this server: give --api-key, or set DRAFTER_API_KEY", host)
    place = f"[{host}]" if ":" in host else host
    server, plan = app.state.server, engine.plan
    rows = f"{plan.max_num_seqs} rows of {server.max_length} tokens"
    notice = f"{options.served_name} on http://{place}:{port}/ ({rows}, {plan.method})"
    try:
        return asyncio.run(_serve(_Uvicorn(config), socket, notice, server, options.drain_seconds))
    finally:
        faulthandler.cancel_dump_traceback_later()


class _Uvicorn(uvicorn.Server):
    """Uvicorn without its signal handlers, which would end the process by the signal instead of with code 0."""

    capture_signals = contextlib.nullcontext  # type: ignore[assignment]


async def _serve(
    server: _Uvicorn, socket: sockets.socket, notice: str, app_server: Server, drain_seconds: float
) -> int:
    worker = app_server.worker
    told = asyncio.Semaphore(0)  # a release for each signal
    async with app_server.running():
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, told.release)
        socket.listen()
        _log.info("%s", notice)  # who started the server waits for this line
        serving = asyncio.create_task(server.serve(sockets=[socket]))
        first, second = (asyncio.create_task(told.acquire()) for _ in range(2))
        await asyncio.wait((serving, first, worker.ended), return_when=asyncio.FIRST_COMPLETED)
        if first.done() and not worker.ended.done():
            message = "told to stop: %d answers still run and get %g seconds; a second signal, or Ctrl-C, stops at once"
            _log.info(message, worker.num_open, drain_seconds)
            worker.drain()
            # A thread that hangs would keep the process alive: then the log says where, and the exit code is 1.
            faulthandler.dump_traceback_later(drain_seconds + _END_SECONDS, exit=True)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(drain_seconds):
                    while worker.num_open and not second.done():  # /ready answers meanwhile
                        await asyncio.sleep(_DRAIN_PAUSE)
                    server.should_exit = True
                    # A second signal does not wait.
                    await asyncio.wait((serving, second), return_when=asyncio.FIRST_COMPLETED)
            faulthandler.dump_traceback_later(_END_SECONDS, exit=True)
    server.should_exit = True
    await asyncio.wait((serving,), timeout=5)  # a client that does not read must not keep the process alive
    server.force_exit = True
    await serving
    return 1 if worker.state == "dead" else 0


class ApiProtocol(H11Protocol):
    """A connection that closes where its next request does not arrive, or its answer stays unread, for long."""

    _clock: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request."""
        super().connection_made(transport)
        self._set_clock()

    def handle_events(self) -> None:
        """Take what was read, and after each answer what waits."""
        super().handle_events()
        self._set_clock()

    def pause_writing(self) -> None:
        """Wait for a client that does not read, for a while: a mere close waits for the client as well."""
        super().pause_writing()
        self._unread = self.loop.call_later(UNREAD_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """Go on: the client has read."""
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are no HTTP, such as a wrong length of a chunk, in the API's form."""
        response = respond(ApiError(400, msg))
        headers = [*response.raw_headers, (b"connection", b"close")]
        start = h11.Response(status_code=400, headers=headers, reason=b"Bad Request")
        for event in (start, h11.Data(data=bytes(response.body)), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _set_clock(self) -> None:
        """The clock runs from a connection's start, or the end of an answer, to the last byte of the next request."""
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            if self._clock is not None:
                self._clock.cancel()
            self._clock = None
        elif self._clock is None:
            self._clock = self.loop.call_later(REQUEST_SECONDS, self.transport.close)
