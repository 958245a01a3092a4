"""Load on a server: a small one that speaks the protocol, counts who is there at once, and refuses when told to."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from drafter.bench import load
from drafter.bench.results import BenchRecord, read_results
from drafter.bench.settings import LoadOptions
from drafter.bench.workload import Item, Workload
from drafter.cli.main import main
from tests.distill.loopback import Respond, send, serving

WORKLOAD = Workload("mine", (Item("", ({"role": "user", "content": "hello"},)), Item("", text="once")))
NUM_PIECES, PIECE_SECONDS = 4, 0.01
EVENTS: list[dict[str, Any]] = [
    {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
    *[{"choices": [{"text": "ab"}]}, {"choices": [{"delta": {"content": "ab"}}]}] * (NUM_PIECES // 2),
    {"choices": [], "usage": {"completion_tokens": 2 * NUM_PIECES}},
]


def run_load(**options: Any) -> list[BenchRecord]:
    return asyncio.run(load.run_load(LoadOptions(**options), WORKLOAD))


class Server:
    """Answers two tokens a piece, a hundredth of a second a piece."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.num_present = self.most_present = 0
        self.bodies: list[tuple[str, dict[str, Any]]] = []
        self.keys: set[str | None] = set()
        self.is_refused = lambda number: False  # which bodies are, by their number
        self.has_usage = True
        self.url = ""

    def respond(self, handler: BaseHTTPRequestHandler, data: bytes) -> None:
        if handler.command == "GET":
            send(handler, 200, b'{"data": [{"id": "tiny"}, {"id": "mine"}]}')
            return
        with self.lock:
            self.num_present += 1
            self.most_present = max(self.most_present, self.num_present)
            self.bodies.append((handler.path, json.loads(data)))
            self.keys.add(handler.headers.get("Authorization"))
            is_refused = self.is_refused(len(self.bodies))
        if is_refused:
            handler.send_error(503, "busy")
        else:
            handler.send_response(200)
            handler.end_headers()
            for event in EVENTS if self.has_usage else EVENTS[:-1]:
                time.sleep(PIECE_SECONDS)
                handler.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        with self.lock:  # before the last event, as the client sends its next request after that event
            self.num_present -= 1
        if not is_refused:
            handler.wfile.write(b"data: [DONE]\n\n")


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server()
    with serving(found.respond) as found.url:
        yield found


def test_requests_under_way_are_as_many_as_asked_for(server: Server) -> None:
    server.is_refused = lambda number: number == 10
    (record,) = run_load(url=server.url, num_requests=9, concurrency=(3,))
    assert server.most_present == 3 and len(server.bodies) == 10  # the first one warms up
    assert record["model"] == "tiny" and record["num_failed"] == 1 and "503" in record["first_error"]
    assert record["num_tokens"] == 8 * 2 * NUM_PIECES
    assert record["first_token_seconds"]["median"] >= PIECE_SECONDS
    # Three pieces come after the first, for seven tokens after the first.
    assert record["token_seconds"]["median"] >= 3 * PIECE_SECONDS / (2 * NUM_PIECES - 1) * 0.9
    assert record["latency_seconds"]["p99"] >= record["latency_seconds"]["median"] >= 4 * PIECE_SECONDS
    assert record["seconds"] >= 3 * NUM_PIECES * PIECE_SECONDS


def test_chats_and_raw_text_go_to_their_own_places(server: Server) -> None:
    server.has_usage = False
    fields = {"model": "mine", "num_requests": 2, "temperature": 0.5, "max_new_tokens": 7, "concurrency": (1,)}
    (record,) = run_load(url=server.url + "/v1/", **fields)
    assert record["num_tokens"] == 2 * NUM_PIECES, "without usage pieces are counted"
    (_, chat), (_, raw) = server.bodies[1:]
    assert [path for path, _ in server.bodies[1:]] == ["/v1/chat/completions", "/v1/completions"]
    assert chat["messages"] == [{"role": "user", "content": "hello"}] and raw["prompt"] == "once"
    sent = {key: chat[key] for key in ("model", "temperature", "max_tokens", "stream")}
    assert sent == {"model": "mine", "temperature": 0.5, "max_tokens": 7, "stream": True}


def test_arrivals_do_not_wait_for_answers(server: Server) -> None:
    (record,) = run_load(url=server.url, num_requests=12, rate=(500.0,))
    assert server.most_present > 4 and record["rate"] == 500.0 and "concurrency" not in record


def refused_by(respond: Respond) -> str:
    """The error of a run against a server that lists a model and answers every request so."""

    def answer(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        if handler.command == "GET" and not body:
            send(handler, 200, b'{"data": [{"id": "tiny"}]}')
        else:
            respond(handler, body)

    with serving(answer) as url, pytest.raises(ValueError, match="refused all 2 requests: ") as caught:
        run_load(url=url, num_requests=2, concurrency=(2,))
    return str(caught.value)


@pytest.mark.parametrize(
    ("status", "data", "message"),
    [
        (200, b'data: {"choices": [{"delta": 1}]}\n\n', "an event of another shape"),
        (200, b"data: " + b"[" * 100_000 + b"\n\n", "an event of another shape"),
        (200, b'data: {"error": "a\\u001b[2J\\ud800\\u202e"}\n\n', ": a\ufffd[2J\ufffd\ufffd"),
        (500, b"b\x1b[2J", "HTTP 500: b\ufffd[2J"),
    ],
    ids=["shape", "depth", "error", "status"],
)
def test_wrong_answers_are_failures_that_can_be_printed(status: int, data: bytes, message: str) -> None:
    assert message in refused_by(lambda handler, _: send(handler, status, data))


def test_an_answer_has_limits_of_size_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "_MOST_LINE", 1 << 16)
    assert "a line of more than" in refused_by(lambda handler, _: send(handler, 200, b"data: " + b" " * (1 << 20)))
    monkeypatch.setattr(load, "_MOST_BYTES", 1 << 18)
    assert "more than" in refused_by(lambda handler, _: send(handler, 200, b"data: \n" * (1 << 18)))
    monkeypatch.setattr(load, "_SECONDS", 0.3)

    def drip(handler: BaseHTTPRequestHandler, _: bytes) -> None:
        handler.send_response(200)
        handler.end_headers()
        for _ in range(100):
            handler.wfile.write(b"data: \n")
            time.sleep(0.05)

    start = time.monotonic()
    assert "TimeoutError" in refused_by(drip)
    assert time.monotonic() - start < 4  # three requests


def test_the_key_travels_to_no_other_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "hush")
    seen: list[str] = []
    with serving(lambda handler, _: seen.append(handler.path)) as other:
        assert "HTTP 307" in refused_by(lambda handler, _: send(handler, 307, b"", Location=other))
    assert seen == []


def test_the_command_records_and_shows_the_table(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret-key")
    (tmp_path / "p.jsonl").write_text('{"prompt": "hello"}\n')
    out = tmp_path / "load.jsonl"
    words = ["bench", "serve", "--url", server.url, "--prompts", str(tmp_path / "p.jsonl"), "--num-requests", "4"]
    assert main([*words, "--concurrency", "1,2", "--rate", "200", "--out", str(out)]) == 0
    table = capsys.readouterr().out
    assert "2 at a time" in table and "200 per second" in table
    assert [record.get("concurrency") for record in read_results([out])] == [1, 2, None]
    assert server.keys == {"Bearer secret-key"} and "secret-key" not in out.read_text()
    assert main(["bench", "report", str(out)]) == 0
    assert "## Load on a server" in capsys.readouterr().out
    most = len(server.bodies) + 1 + 4
    server.is_refused = lambda number: number > most  # the second level is refused, the first is kept
    assert main([*words, "--concurrency", "1,2", "--out", str(out)]) == 2
    assert "refused all 4 requests" in capsys.readouterr().err
    assert [record.get("concurrency") for record in read_results([out])] == [1, 2, None, 1]
