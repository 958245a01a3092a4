"""A server with the tiny target, live on a loopback port, and clients for it."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import httpx
import openai
import uvicorn

from drafter.decoding.params import SamplingParams
from drafter.engine.engine import Engine
from drafter.serving.app import Server, create_app
from drafter.serving.listen import ApiProtocol
from drafter.serving.options import ServeOptions
from tests.serving.tiny import tiny_engine

MODEL = "tiny"


def wait_until(condition: Any, seconds: float = 60.0) -> None:
    """Until it is true; AssertionError when it stays false."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


@dataclass
class Live:
    """A running server: its root and its insides."""

    url: str
    server: Server

    @cached_property
    def client(self) -> openai.OpenAI:
        """One for all: making one takes longer than most answers."""
        return openai.OpenAI(base_url=self.url + "/v1", api_key="first-key", max_retries=0, timeout=60)

    def http(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, **({"timeout": 60} | options))

    def metric(self, name: str, **labels: str) -> float:
        return self.server.metrics.registry.get_sample_value(f"drafter_{name}", labels) or 0.0

    def wait_until_idle(self) -> None:
        """No open answers, no rows in use."""
        wait_until(lambda: self.server.worker.num_open == 0 and self.metric("active_rows") == 0)


@contextmanager
def live_server(engine: Engine | None = None, **options: Any) -> Iterator[Live]:
    """Start a server, and stop it at the end."""
    app = create_app(engine or tiny_engine(), ServeOptions(target=MODEL, **options))
    config = uvicorn.Config(
        app, host="127.0.0.1", port=0, log_level="error", timeout_graceful_shutdown=2, http=ApiProtocol
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        live = Live("", app.state.server)
        wait_until(lambda: server.started and live.server.worker.state == "ready", 120)
        port = server.servers[0].sockets[0].getsockname()[1]
        live.url = f"http://127.0.0.1:{port}"
        yield live
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive(), "the server did not stop"


def is_ready(url: str) -> bool:
    try:
        return httpx.get(url + "/ready").status_code == 200
    except httpx.TransportError:
        return False


def offline(messages: list[dict[str, str]] | list[int] | str, **params: Any) -> Any:
    """The answer that plain decoding gives, without server or drafter."""
    engine = tiny_engine(method="none", tree_size=1)
    sampling = SamplingParams(**{"max_new_tokens": 24} | params)
    return engine.generate([messages], sampling, raw=isinstance(messages, str))[0]
