"""What a server refuses, how it ends, and what hang-ups leave behind: nothing."""

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
import torch

from drafter.engine.engine import Engine
from drafter.serving import listen
from tests.serving.live import MODEL, Live, live_server, offline, wait_until
from tests.serving.tiny import failing_once, tiny_engine

CHAT = "/v1/chat/completions"
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 4}
LONG = BODY | {"max_tokens": 230, "ignore_eos": True}
LARGE = BODY | {"user": "x" * 3_000_000}
SITE = "https://app.example"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def strict() -> Iterator[Live]:
    """Two rows, a queue of one, keys, pages of one site."""
    settings: dict[str, Any] = {"max_queue": 1, "api_key": ("first-key", "second-key"), "cors_origin": (SITE,)}
    with live_server(tiny_engine(max_num_seqs=2, method="none", tree_size=1), **settings) as server:
        yield server


@pytest.fixture
def http(strict: Live) -> Iterator[httpx.Client]:
    """A client of the strict server with a key."""
    with strict.http(headers=key()) as client:
        yield client


def key(name: str = "first-key") -> dict[str, str]:
    return {"Authorization": f"Bearer {name}"}


def test_keys(strict: Live) -> None:
    with strict.http() as http:
        bad = ("Bearer wrong", "Bearer", "first-key", "Basic first-key")
        for headers in ({}, *({"Authorization": value} for value in bad)):
            answers = [http.get(path, headers=headers) for path in ("/v1/models", "/openapi.json")]
            for answer in (http.post(CHAT, json=BODY, headers=headers), *answers):
                assert answer.status_code == 401
                assert answer.json()["error"]["code"] == "invalid_api_key"
                assert answer.headers["www-authenticate"] == "Bearer"
        for good in ("Bearer second-key", "bearer first-key"):
            assert http.post(CHAT, json=BODY, headers={"Authorization": good}).status_code == 200
        for path in ("/health", "/ready", "/metrics", "/"):
            assert http.get(path).status_code == 200, "probes need no key"
    assert strict.metric("requests_total", outcome="unauthorized") == 5


def test_bodies_that_are_too_large_or_no_json(live: Live, http: httpx.Client) -> None:
    declared = {"Content-Type": "application/json"}
    assert http.post(CHAT, json=LARGE).status_code == 413
    answer = raw(live, POST + b"Expect: 100-continue\r\nContent-Length: 3000000\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 413"), "no body was asked for"
    chunked = (b" " * 10_000 for _ in range(300))
    assert http.post(CHAT, content=chunked, headers=declared).status_code == 413, "no length declared"
    assert http.post(CHAT, content=json.dumps(BODY)).status_code == 415
    huge = b'{"n": 1' + b"0" * 5000 + b"}"
    for body in (b"", b"{", b"\xff\xfe", b"[" * 9000, b'{"model": NaN}', b"null", b'"x"', huge):
        found = http.post(CHAT, content=body, headers=declared)
        assert (found.status_code, found.json()["error"]["type"]) == (400, "invalid_request_error"), body[:20]
    # Unknown places and methods answer in the API's shape as well.
    found = http.get("/v1/nothing")
    assert (found.status_code, found.json()["error"]["type"]) == (404, "invalid_request_error")
    found = http.get(CHAT)
    assert (found.status_code, found.headers["allow"]) == (405, "POST")
    assert http.get("/docs").status_code == 404, "no page that loads scripts from elsewhere"


def test_pages_of_other_sites(strict: Live, live: Live) -> None:
    name = "access-control-allow-origin"
    with strict.http() as http:
        wants = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        assert http.options(CHAT, headers=wants | {"Origin": SITE}).headers[name] == SITE
        assert name not in http.options(CHAT, headers=wants | {"Origin": "https://x.example"}).headers
        for body, headers, status in (
            (BODY, {}, 401), (BODY | {"stream": True}, key(), 200), (BODY | {"model": "x"}, key(), 404),
            (LARGE, key(), 413),
        ):  # fmt: skip
            answer = http.post(CHAT, json=body, headers=headers | {"Origin": SITE})
            assert (answer.status_code, answer.headers[name]) == (status, SITE)
    with live.http() as http:
        assert name not in http.post(CHAT, json=BODY, headers={"Origin": SITE}).headers, "unless told"


def test_full_queue(strict: Live) -> None:
    create = strict.client.chat.completions.create
    long: dict[str, Any] = BODY | {"max_tokens": 230, "extra_body": {"ignore_eos": True}}
    streams = [create(**long, stream=True) for _ in range(3)]
    with pytest.raises(openai.RateLimitError) as caught:
        create(**long)
    assert int(caught.value.response.headers["retry-after"]) >= 1
    assert caught.value.code == "queue_full"
    for stream in streams:
        stream.close()
    strict.wait_until_idle()


@pytest.mark.parametrize("is_stream", [False, True])
def test_hang_ups_free_their_rows(strict: Live, is_stream: bool) -> None:
    before = strict.metric("requests_total", outcome="hung_up")
    body = json.dumps(LONG | {"stream": is_stream}).encode()
    head = POST + f"Authorization: Bearer first-key\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    whole = head.replace(b"completions", b"chat/completions") + body
    sockets = [connect(strict, whole) for _ in range(3)]  # two run, one waits
    wait_until(lambda: strict.metric("active_rows") == 2 and strict.metric("queue_depth") == 1)
    sockets.append(connect(strict, whole[:-1]))
    for connection in sockets:
        connection.close()
    strict.wait_until_idle()
    wait_until(lambda: strict.metric("requests_total", outcome="hung_up") == before + 4)
    num_tokens = strict.metric("generated_tokens_total")
    time.sleep(0.05)
    assert strict.metric("generated_tokens_total") == num_tokens


def test_places_are_taken_while_prompts_are_encoded(strict: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hung-up clients give their places back at once."""

    async def encode(asked: Any) -> list[int]:
        await asyncio.sleep(30)
        return []

    monkeypatch.setattr(strict.server.encoder, "encode", encode)
    body = json.dumps(BODY).encode()
    head = POST.replace(b"completions", b"chat/completions") + b"Authorization: Bearer first-key\r\n"
    whole = head + f"Content-Length: {len(body)}\r\n\r\n".encode() + body
    sockets = [connect(strict, whole) for _ in range(3)]
    wait_until(lambda: strict.server.worker.num_open == 3)
    assert raw(strict, whole.replace(b"Host", b"Connection: close\r\nHost", 1)).startswith(b"HTTP/1.1 429")
    for connection in sockets:
        connection.close()
    strict.wait_until_idle()


def test_bodies_and_answers_have_a_limit(live: Live, http: httpx.Client) -> None:
    head = key() | {"Content-Type": "application/json"}
    for values in ("[]," * 300_000 + "[]", "1," * 600_000 + "1"):
        answer = http.post("/v1/completions", content=f'{{"prompt": [{values}]}}', headers=head)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "body_too_large")
    nothing = {"prompt": '[],"\\' * 100_000, "model": "other"}
    assert http.post("/v1/completions", json=nothing).status_code == 404, "marks within a text do not count"
    many = {"prompt": "a", "n": 3, "max_tokens": 250, "logprobs": 20}
    with live.http() as other:
        assert other.post("/v1/completions", json=many | {"n": 64}).json()["error"]["param"] == "logprobs"
        assert len(other.post("/v1/completions", json=many).json()["choices"]) == 3
        assert other.get("/v1/models/tiny").json()["id"] == MODEL and other.head("/health").status_code == 200
        assert other.get("/v1/models/other").json()["error"]["code"] == "model_not_found"


def test_a_client_that_never_reads_loses_its_connection(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listen, "UNREAD_SECONDS", 0.3)
    with connect(live, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 400) as connection:
        time.sleep(1.5)
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while part := connection.recv(1 << 20):
                received += part
    assert received.count(b"HTTP/1.1 200") < 400


def slow_engine(seconds: float) -> Engine:
    """An engine whose every step takes a while."""
    engine = tiny_engine(max_num_seqs=2, method="none", tree_size=1)
    step = engine.step
    engine.step = lambda: time.sleep(seconds) or step()  # type: ignore[method-assign, func-returns-value]
    return engine


def test_requests_that_take_too_long() -> None:
    with live_server(slow_engine(0.01), request_timeout=0.3) as server, server.http() as http:
        answer = http.post(CHAT, json=LONG)
        assert answer.status_code == 504 and answer.json()["error"]["code"] == "timeout"
        *events, last = http.post(CHAT, json=LONG | {"stream": True}).text.strip().split("\n\n")
        assert len(events) > 1 and json.loads(last.removeprefix("data: "))["error"]["code"] == "timeout"
        server.wait_until_idle()
        assert server.metric("requests_total", outcome="timed_out") == 2


def test_failed_step_is_a_500_for_its_requests_only() -> None:
    engine = tiny_engine(max_num_seqs=2)
    with live_server(engine) as server, server.http() as http:
        for is_stream, status in ((False, 500), (True, 200)):
            engine.step = failing_once(engine.step, RuntimeError("secret"))  # type: ignore[method-assign]
            answer = http.post(CHAT, json=BODY | {"stream": is_stream})
            assert answer.status_code == status and '"server_error"' in answer.text
            assert "secret" not in answer.text and "[DONE]" not in answer.text
        assert http.post(CHAT, json=BODY).status_code == 200
        text = http.get("/metrics").text
        assert all(f"drafter_{name}" in text for name in ("queue_depth 0.0", "time_to_first_token_seconds_count"))
        assert server.metric("generated_tokens_total") >= server.metric("target_forwards_total") > 0
        assert server.metric("failed_steps_total", cause="error") == 2
        assert server.metric("requests_total", outcome="failed") == 2


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA"), RuntimeError("DefaultCPUAllocator: can't allocate memory: x")]
)
def test_out_of_memory_sheds_the_latest_half(error: Exception) -> None:
    engine, asking = tiny_engine(max_num_seqs=4), []
    step, all_wait = failing_once(engine.step, error, after=3), threading.Event()
    engine.step = lambda: all_wait.wait(60) and step()  # type: ignore[method-assign]
    body = {"model": MODEL, "temperature": 0, "max_tokens": 30, "ignore_eos": True}
    with live_server(engine) as server, server.http() as http, ThreadPoolExecutor(6) as pool:
        for number in range(6):
            asking.append(pool.submit(http.post, "/v1/completions", json=body | {"prompt": f"call {number}"}))
            wait_until(lambda: server.server.worker.num_open == len(asking))
        all_wait.set()
        answers = [item.result(60) for item in asking]
        assert [answer.status_code for answer in answers] == [200, 200, 503, 503, 200, 200]
        assert answers[2].json()["error"]["code"] == "out_of_memory"
        for number in (0, 1, 4, 5):
            wanted = offline(f"call {number}", max_new_tokens=30, ignore_eos=True).text
            assert answers[number].json()["choices"][0]["text"] == wanted


def test_health_and_readiness() -> None:
    engine = slow_engine(0.2)
    with live_server(engine) as server, server.http() as http:
        assert http.get("/ready").json() == {"status": "ready"}
        with http.stream("POST", CHAT, json=BODY | {"stream": True}) as running, server.http() as other:
            lines = running.iter_lines()
            next(lines)
            server.server.worker.drain()
            assert (other.get("/ready").status_code, other.get("/health").status_code) == (503, 200)
            late = other.post(CHAT, json=BODY)
            assert late.status_code == 503 and "retry-after" in late.headers
            assert "data: [DONE]" in list(lines), "what runs is finished"


def connect(live: Live, part: bytes = b"") -> socket.socket:
    """A connection on which a part of a request was sent."""
    host, port = live.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=20)
    connection.sendall(part)
    return connection


def raw(live: Live, *parts: bytes, pause: float = 0.0) -> bytes:
    """The answer to bytes sent as they are."""
    with connect(live) as connection:
        for part in parts:
            connection.sendall(part)
            time.sleep(pause)
        return b"".join(iter(lambda: connection.recv(65536), b""))


def test_two_ends_of_a_body_are_refused_and_the_connection_is_closed(live: Live) -> None:
    second = b"GET /smuggled HTTP/1.1\r\nHost: localhost\r\n\r\n"
    body = b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + second
    for path in (b"/v1/completions", b"/health"):
        answer = raw(live, POST.replace(b"/v1/completions", path) + body)
        assert answer.startswith(b"HTTP/1.1 400") and b"Transfer-Encoding: send one" in answer
        assert answer.count(b"HTTP/1.1") == 1 and b"connection: close" in answer.lower()


def test_slow_requests_end_the_connection(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listen, "REQUEST_SECONDS", 0.3)
    start = time.monotonic()
    assert raw(live) == b"", "nothing was sent"
    assert raw(live, b"GET /health HTTP/1.1\r\n", b"Host: localhost\r\n", b"X-Slow: 1") == b""
    head = POST + b"Content-Length: 9\r\n\r\n"
    assert raw(live, head, b"{", pause=0.1) == b"", "the body never comes"
    whole = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    for parts in ((whole, b"GET /health HT"), (whole + head + b"{",)):
        answer = raw(live, *parts, pause=0.1)
        assert answer.count(b"HTTP/1.1 200") == 1, "the second request of a connection never comes"
    assert time.monotonic() - start < 4, "the server's own limit for idle connections is longer"
    with live.http() as client:  # a request that takes longer than its headers may
        assert client.post(CHAT, json=BODY | {"max_tokens": 100}).status_code == 200


@pytest.mark.parametrize("path", ["/v1/models", "/v1/drafter/reload", "/"])
def test_names_of_other_sites_that_lead_here_are_refused_without_a_key(live: Live, strict: Live, path: str) -> None:
    """A page of such a site is of one origin with the server (DNS rebinding)."""
    with live.http(follow_redirects=False) as http:

        def status(host: str, path: str = path) -> int:
            return http.get(path, headers={"Host": host, "Origin": f"http://{host}"}).status_code

        for host in ("evil.example:8000", "localhost.evil.example", "1.2.3.4.evil", "[evil"):
            assert status(host) == 403
        for host in ("localhost:8000", "LOCALHOST", "127.0.0.1:8000", "[::1]:8000", "192.168.1.7"):
            assert status(host) != 403
        assert status("127.0.0.1", "/v1/models/") == 404, "no redirect names the client's host"
    with strict.http(headers=key() | {"Host": "models.example"}) as http:
        assert http.get("/v1/models").status_code == 200, "a key keeps strangers out"


def test_bytes_that_are_no_http_get_an_error_in_the_form_of_the_api(live: Live) -> None:
    for text in (POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", b"nonsense\r\n\r\n"):
        start, _, body = raw(live, text).partition(b"\r\n\r\n")
        assert start.startswith(b"HTTP/1.1 400 ") and b"application/json" in start
        assert json.loads(body)["error"]["type"] == "invalid_request_error"
