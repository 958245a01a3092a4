"""The server process: a socket, uvicorn, signals, and an exit code."""

import asyncio
import contextlib
import logging
import signal
import socket as sockets
from collections.abc import Iterator

import uvicorn

from drafter.engine.engine import Engine
from drafter.serving.app import create_app
from drafter.serving.http import ApiProtocol
from drafter.serving.options import ServeOptions
from drafter.serving.server import Server, ServerSettings

_log = logging.getLogger("drafter.serving")
_LOOPBACK = ("127.", "::1", "localhost")


def bind(host: str, port: int) -> sockets.socket:
    """A bound socket that does not listen yet.

    Raises:
        OSError: the address is taken or not this machine's.
    """
    try:
        family, kind, _, _, address = sockets.getaddrinfo(
            host, port, type=sockets.SOCK_STREAM, flags=sockets.AI_PASSIVE
        )[0]
    except sockets.gaierror as error:
        raise OSError(f"--host {host}: {error.strerror}") from error
    socket = sockets.socket(family, kind)
    try:
        socket.setsockopt(sockets.SOL_SOCKET, sockets.SO_REUSEADDR, 1)
        socket.bind(address)
    except OSError as error:
        socket.close()
        raise OSError(
            f"cannot listen on {host}, port {port}: {error.strerror}; give another --host or --port"
        ) from error
    return socket


def settings_of(options: ServeOptions, api_keys: tuple[str, ...]) -> ServerSettings:
    """The part of the options that the application goes by."""
    return ServerSettings(
        model_name=options.served_name,
        max_queue=options.max_queue,
        request_timeout=options.request_timeout,
        max_body_bytes=options.max_body_bytes,
        api_keys=api_keys,
        cors_origins=options.cors_origin,
        escape_special_tokens=options.escape_special_tokens,
    )


def listen(socket: sockets.socket, engine: Engine, options: ServeOptions, *, api_keys: tuple[str, ...]) -> int:
    """Serve until told to stop; the exit code: 0, or 1 when the engine broke."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.INFO)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    settings = settings_of(options, api_keys)
    app = create_app(engine, settings)
    config = uvicorn.Config(
        app, log_config=None, access_log=False, log_level="warning", server_header=False, http=ApiProtocol
    )
    host, port = socket.getsockname()[:2]
    if not api_keys and not host.startswith(_LOOPBACK):
        _log.warning("anybody who reaches %s can use this server: give --api-key, or set DRAFTER_API_KEY", host)
    place = f"[{host}]" if ":" in host else host
    rows = f"{engine.config.max_rows} rows of {engine.config.max_length} tokens"
    news = f"{settings.model_name} on http://{place}:{port}/ ({rows}, {engine.config.method})"
    return asyncio.run(_serve(config, socket, app.state.server, options.drain_seconds, news))


class _Uvicorn(uvicorn.Server):
    """Without signal handlers of its own, which would end the process by the signal instead of with code 0."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve(
    config: uvicorn.Config, socket: sockets.socket, app_server: Server, drain_seconds: float, news: str
) -> int:
    server, worker = _Uvicorn(config), app_server.worker
    loop = asyncio.get_running_loop()
    is_told = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, is_told.set)
    told = asyncio.create_task(is_told.wait())
    # The socket does not listen yet: nobody connects to a server whose engine cannot make a token.
    starting = asyncio.create_task(app_server.start())
    await asyncio.wait({starting, told}, return_when=asyncio.FIRST_COMPLETED)
    has_failed = starting.done() and starting.exception() is not None
    if has_failed or not starting.done():
        starting.cancel()
        told.cancel()
        await app_server.encoder.close()
        if has_failed:
            starting.result()  # raises
        return 0  # nobody waits for an answer yet
    _log.info("%s", news)
    serving = asyncio.create_task(server.serve(sockets=[socket]))
    broken = asyncio.create_task(worker.ended.wait())
    await asyncio.wait({serving, told, broken}, return_when=asyncio.FIRST_COMPLETED)
    if not serving.done() and not broken.done():
        _log.info("told to stop: %d answers still run and get %g seconds", worker.num_open, drain_seconds)
        worker.drain()
        server.should_exit = True
        is_told.clear()
        again = asyncio.create_task(is_told.wait())  # a second signal does not wait
        await asyncio.wait({serving, again}, timeout=drain_seconds, return_when=asyncio.FIRST_COMPLETED)
        again.cancel()
        if not serving.done():
            await worker.stop()
    server.should_exit = True
    for task in (told, broken):
        task.cancel()
    # Whoever has been told of the end closes; a client that does not read cannot keep the process alive.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(5):
            await asyncio.shield(serving)
    server.force_exit = True
    await serving
    return 1 if worker.state == "dead" else 0
