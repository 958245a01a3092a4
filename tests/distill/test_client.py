"""The HTTP client against a server that means harm: the key stays, limits hold, no reply is a trace."""

import json
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler
from typing import Any, NamedTuple

import pytest

from drafter.decoding.params import SamplingParams
from drafter.distill import client
from drafter.distill.client import Client, ServerError, read_reply
from drafter.distill.endpoint import made_answer
from drafter.distill.prompts import PromptRow, WantedAnswer, row_of
from tests.data.tiny import chat
from tests.distill.loopback import send, serving

SEED, NUM_WRONG = 28, 450


class Seen(NamedTuple):
    url: str
    requests: list[tuple[str, str | None]]  # method and key


@contextmanager
def strange(respond: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[Seen]:
    seen: list[tuple[str, str | None]] = []

    def note(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        seen.append((handler.command, handler.headers["Authorization"]))
        respond(handler)

    with serving(note) as url:
        yield Seen(url, seen)


def sending(data: bytes, status: int = 200, **headers: str) -> Callable[[BaseHTTPRequestHandler], None]:
    return lambda handler: send(handler, status, data, **headers)


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setenv("OPENAI_API_KEY", "hush")


@pytest.mark.parametrize("status", [302, 308])
def test_the_key_travels_to_no_other_place(status: int) -> None:
    with strange(sending(b"{}")) as other, strange(sending(b"", status, Location=other.url + "/v1/x")) as named:
        for call in (lambda: Client(named.url).complete("completions", {}), lambda: Client(named.url).get(named.url)):
            with pytest.raises(ServerError, match=f"HTTP {status}: redirects to '{other.url}.*not followed") as caught:
                call()
            assert str(caught.value).isprintable()
        with pytest.raises(ValueError, match="lists no models: HTTP 30"):
            Client(named.url).model_card()
        assert other.requests == []
        assert named.requests == [("POST", "Bearer hush"), ("GET", "Bearer hush"), ("GET", "Bearer hush")]


def test_no_error_shows_a_key_that_no_header_may_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    with strange(lambda handler: handler.send_error(418)) as server:
        monkeypatch.setenv("OPENAI_API_KEY", "hush\r\n")
        with pytest.raises(ServerError):
            Client(server.url).get(server.url)
        assert server.requests[0][1] == "Bearer hush"
    for key in ("hush\nhush", "hush\x7f", "hushé"):
        monkeypatch.setenv("OPENAI_API_KEY", key)
        with pytest.raises(ValueError, match="OPENAI_API_KEY") as caught:
            Client("http://localhost")
        assert "hush" not in str(caught.value)


def test_a_reply_has_limits_of_size_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def drip(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        for _ in range(200):
            handler.wfile.write(b" ")
            time.sleep(0.05)

    def drip_headers(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\n")
        for number in range(200):
            handler.wfile.write(f"X-{number}: a\r\n".encode())
            time.sleep(0.05)

    for slow in (drip, drip_headers):
        with strange(slow) as server:
            start = time.monotonic()
            with pytest.raises(OSError, match="no whole answer in 0.4 seconds"):
                Client(server.url, timeout=0.4).complete("completions", {})
            assert time.monotonic() - start < 4

    def endless(status: int, handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        handler.end_headers()
        while True:
            handler.wfile.write(b"no " * 65536)

    monkeypatch.setattr(client, "MAX_REPLY_BYTES", 1 << 20)
    with strange(partial(endless, 200)) as server, pytest.raises(ValueError, match="larger than 1 MiB"):
        Client(server.url).complete("completions", {})
    with (
        strange(sending(b"\x1f\x8b bomb", Content_Encoding="gzip")) as server,
        pytest.raises(ValueError, match="packed"),
    ):
        Client(server.url).complete("completions", {})

    with strange(partial(endless, 500)) as server, pytest.raises(ServerError, match="HTTP 500: no no") as caught:
        Client(server.url).complete("completions", {})
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "data",
    [
        b'{"error": {"message": "a\\u001b]0;x\\u0007\\u202e b\\n\\nc"}}', b"\x1b[31mred\x1b[0m\x00", b"[" * 4000,
        b'{"error": [1]}', b'{"error": {"message": {"a": 1e999}}}', b'"\\ud800"', b"", b"\xff\xfe",
    ],
)  # fmt: skip
def test_errors_are_one_printable_line(data: bytes) -> None:
    retry_after = {b"": "9" * 400, b"[" * 4000: "\xb2"}.get(data, "-1")
    with strange(sending(data, 503, Retry_After=retry_after)) as server:
        with pytest.raises(ServerError) as caught:
            Client(server.url).complete("completions", {})
        assert caught.value.code == 503 and str(caught.value).isprintable() and len(str(caught.value)) < 400
        assert caught.value.retry_after >= 0


LOGPROBS = {"content": [{"token": "a", "logprob": -1.5}, {"token": "b", "logprob": -0.5}]}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
VALID: list[dict[str, Any]] = [
    {
        "prompt_token_ids": [1, 2], "usage": {"prompt_tokens": 2, "completion_tokens": 2},
        "metrics": {"speculative_decoding": {"acceptance_histogram": [1, 2]}},
        "choices": [{"message": {"content": "ab", "reasoning": "r", "tool_calls": [CALL]}, "token_ids": [3, 4],
                     "finish_reason": "stop", "logprobs": LOGPROBS, "details": {"tokens": [["a", True]]}}],
    },
    {
        "usage": {"prompt_tokens": 2, "completion_tokens": 2},
        "choices": [{"text": "ab", "response_token_ids": [3, 4], "prompt_token_ids": [1], "finish_reason": "length",
                     "logprobs": {"tokens": ["a", "b"], "token_logprobs": [-1, -2]}, "meta_info": {"a": 1}}],
    },
]  # fmt: skip
WRONG = [
    None, True, -1, 0, 2**31, 2**70, 10**400, 1.5, -1e400, float("nan"), "", "x", "\ud800", "\x1b[2J", [], {}, [[]],
    [None], [-1], [2**80], [1.0], [True], ["x"], {"a": {}}, [{"a": 1}], {"content": [1]}, {"tokens": 1},
]  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    for name, part in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(part, (*path, name))


def changed(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = changed(value[path[0]], path[1:], new)
    return copy


def wrong_replies() -> list[bytes]:
    """Valid replies with one to three values replaced, and broken texts."""
    chance, found = random.Random(SEED), []
    deep = b'{"choices": [{"text": "a", "x": ' + b"[" * 3000 + b"]" * 3000 + b"}]}"
    texts = [deep, b"[" * 200_000, b"", b"null", b"\xff", b'{"choices": ', b'{"choices": [{"text": "\\udc00"}]}']
    while len(found) < NUM_WRONG:
        reply: Any = chance.choice(VALID)
        for _ in range(chance.randint(1, 3)):
            reply = changed(reply, chance.choice(list(places(reply))), chance.choice(WRONG))
        found.append(json.dumps(reply).encode())
    return texts + found


def test_wrong_replies_are_rows_or_one_line() -> None:
    """A reply is taken whole, as a row that can be written and counted, or is refused in one printable line."""
    replies = wrong_replies()
    queue = iter(replies)
    item = WantedAnswer(PromptRow("p", tuple(chat("Why?")), "test"), 0, SamplingParams())
    num_refused = 0
    with strange(lambda handler: sending(next(queue))(handler)) as server:
        asked = Client(server.url)
        for data in replies:
            try:
                reply = asked.complete("chat/completions", {})
            except ValueError as error:
                assert str(error).isprintable() and len(str(error)) < 400, data
                num_refused += 1
                continue
            row = json.dumps(row_of(item, made_answer(reply)), ensure_ascii=False, allow_nan=False)
            row.encode()
            assert 0 <= reply.num_tokens < 2**31, data
            for ids in (reply.prompt_ids, reply.token_ids):
                assert all(type(token) is int and 0 <= token < 2**31 for token in ids), data
    assert len(replies) >= 400 and 200 < num_refused < len(replies), num_refused


def test_a_reply_is_read_in_every_form() -> None:
    """vLLM's and SGLang's names and places; null is an absent field."""
    chat, completion = (read_reply(reply | {"system_fingerprint": None}) for reply in VALID)
    assert (chat.text, chat.has_parts, chat.num_tokens) == ("ab", True, 2)
    assert (chat.prompt_ids, chat.token_ids, chat.logprobs) == ([1, 2], [3, 4], [])
    assert (completion.text, completion.finish_reason) == ("ab", "length")
    assert (completion.prompt_ids, completion.token_ids, completion.logprobs) == ([1], [3, 4], [-1.0, -2.0])
    message = {"content": None, "tool_calls": [CALL], "reasoning": None}
    found = read_reply({"choices": [{"message": message, "token_ids": None, "logprobs": None}], "usage": None})
    assert (found.text, found.has_parts, found.token_ids, found.finish_reason) == ("", True, [], "stop")
    for broken in ({"choices": []}, [], {"choices": [{"message": "x"}]}, {"choices": [{"message": {}}]}):
        with pytest.raises(ValueError, match="the reply is no completion"):
            read_reply(broken)


def test_lists_of_models_are_checked() -> None:
    good = {"data": [{"id": "a", "owned_by": "vllm", "max_model_len": 100, "permission": [{}]}]}
    kept = {"id": "a", "owned_by": "vllm"}
    with strange(sending(json.dumps(good).encode())) as server:
        assert Client(server.url).model_card() == kept == Client(server.url).model_card("a")
        with pytest.raises(ValueError, match="--model b is not served at .* it serves a"):
            Client(server.url).model_card("b")
