"""The process around the application: signals, draining, exit codes; here within the tests' own process."""

import contextlib
import os
import signal
import socket as sockets
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from drafter.engine.engine import Engine
from drafter.serving import listen as listen_module
from drafter.serving.listen import bind, listen, load_engine
from drafter.serving.options import ServeOptions
from tests.serving.live import MODEL, is_ready
from tests.serving.test_limits import CHAT, slow_engine
from tests.serving.tiny import break_for_good, tiny_engine

BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "ignore_eos": True, "stream": True}


def serve(engine: Engine, client: Callable[[str], None], host: str = "127.0.0.1", **options: Any) -> int:
    """Serve on this thread while a client acts on another; the exit code."""

    def act(url: str) -> None:
        try:
            while not is_ready(url):
                time.sleep(0.02)
            client(url)
        except BaseException:
            terminate()
            raise

    with bind(host, 0) as socket, ThreadPoolExecutor(1) as pool:
        acting = pool.submit(act, f"http://127.0.0.1:{socket.getsockname()[1]}")
        code = listen(socket, engine, ServeOptions(target=MODEL, **options))
        acting.result(20)
    return code


def stream(url: str, max_tokens: int, *, then: Callable[[], None]) -> list[str]:
    """The lines of an answer; something happens after the first."""
    with httpx.stream("POST", url + CHAT, json=BODY | {"max_tokens": max_tokens}, timeout=30) as response:
        lines = response.iter_lines()
        first = next(lines)
        then()
        return [line for line in (first, *lines) if line]


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_running_streams_are_finished_and_nobody_new_comes_in(caplog: pytest.LogCaptureFixture) -> None:
    def client(url: str) -> None:
        assert stream(url, 60, then=terminate)[-1] == "data: [DONE]"
        with pytest.raises(httpx.TransportError):
            for _ in range(50):  # the socket closes within a tenth of a second
                httpx.get(url + "/health")
                time.sleep(0.02)

    with caplog.at_level("INFO", "drafter.serving"):
        assert serve(slow_engine(0.005), client, host="0.0.0.0") == 0
    assert "every client that reaches 0.0.0.0" in caplog.text


@pytest.mark.parametrize(("seconds", "is_told_twice"), [(0.3, False), (300, True)])
def test_what_outlasts_the_drain_or_a_second_signal_is_told_so(seconds: float, is_told_twice: bool) -> None:
    def tell() -> None:
        terminate()
        if is_told_twice:
            time.sleep(0.3)
            terminate()

    def client(url: str) -> None:
        lines = stream(url, 240, then=tell)
        assert "shut down" in lines[-1] and len(lines) > 2, "what runs goes on until then"

    assert serve(slow_engine(0.02), client, drain_seconds=seconds) == 0


def test_a_server_without_its_engine_ends_with_code_one() -> None:
    engine = tiny_engine()

    def client(url: str) -> None:
        break_for_good(engine)
        assert httpx.post(url + CHAT, json=BODY | {"stream": False}).status_code == 500

    assert serve(engine, client) == 1


def test_a_server_limits_the_kernels_that_onednn_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a model is loaded, because the variable is read once; a user's own value stays."""
    name = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
    monkeypatch.setenv(name, "7")  # so that the test's end removes what the server sets
    for expected in ("7", "128"):
        with pytest.raises(FileNotFoundError, match="nowhere"):
            load_engine(ServeOptions(target="/nowhere", device="cpu"))
        assert os.environ.pop(name) == expected


def test_the_processes_of_clients_programs_start_before_the_cache_is_there(target: str, monkeypatch) -> None:
    """A fork keeps the pages of a cache that it shares, once the server writes to them."""
    reserve, forks = Engine.reserve, list[int]()

    def reserved(engine: Engine, num_slots: int) -> None:
        forks.extend(fork._child.pid for fork in (engine.target.encoder, engine.grammars._trial))
        reserve(engine, num_slots)

    monkeypatch.setattr(Engine, "reserve", reserved)
    options = ServeOptions(target=target, device="cpu", max_model_len=64)
    load_engine(options).target.encoder.close()
    assert len(set(forks)) == 2, "of templates, and of the forms of answers"
    monkeypatch.setattr(Engine, "step", lambda _: 1 / 0)
    with pytest.raises(ValueError, match="first tokens: ZeroDivisionError"):
        load_engine(options)


def test_the_notice_comes_when_the_socket_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who starts a server waits for the notice."""
    found: list[bool] = []
    with bind("127.0.0.1", 0) as socket:
        name = socket.getsockname()

        def told(message: str, *args: Any) -> None:
            if "http://" in message % args:
                with contextlib.suppress(ConnectionRefusedError), sockets.create_connection(name, timeout=5):
                    found.append(True)
                terminate()

        monkeypatch.setattr(listen_module._log, "info", told)
        assert listen(socket, tiny_engine(), ServeOptions(target=MODEL)) == 0
    assert found


def test_a_process_whose_threads_hang_ends_after_the_drain() -> None:
    script = """
import os, signal, threading
from drafter.serving import listen, worker
from drafter.serving.options import ServeOptions
from tests.serving.tiny import tiny_engine
listen._END_SECONDS = 0.5
def hang(self):
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(60)
worker.Worker._run = hang
with listen.bind("127.0.0.1", 0) as socket:
    listen.listen(socket, tiny_engine(), ServeOptions(target="tiny", drain_seconds=0.1))
"""
    done = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "in hang" in done.stderr, "the log says where"
