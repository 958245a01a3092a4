"""The HTTP client against a server that means harm: the key stays, limits hold, no reply is a trace."""

import json
import random
import time
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

from drafter.data.formats import Row
from drafter.decoding.params import SamplingParams
from drafter.distill.prompts import WantedAnswer, row_of
from drafter.utils import client
from drafter.utils.client import Client, Reply, ServerError
from drafter.utils.parse import validated
from tests.data.tiny import chat
from tests.distill.loopback import Respond, send, serving
from tests.robustness.harness import VALUES, mutated

SEED, NUM_WRONG = 28, 900


def sending(data: bytes, status: int = 200, seen: list | None = None, **headers: str) -> Respond:
    """One answer to all requests; their methods and keys go into ``seen``."""

    def respond(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        if seen is not None:
            seen.append((handler.command, handler.headers["Authorization"]))
        send(handler, status, data, **headers)

    return respond


def pouring(begin: bytes, piece: bytes, pause: float = 0.0) -> Respond:
    """An answer without end."""

    def respond(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        handler.wfile.write(b"HTTP/1.0 " + begin)
        while True:
            handler.wfile.write(piece)
            time.sleep(pause)

    return respond


def test_the_key_travels_to_no_other_place_and_no_error_shows_a_wrong_key(monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere: list = []
    seen: list = []
    with (
        serving(sending(b"{}", seen=elsewhere)) as other,
        serving(sending(b"", 302, seen, Location=other + "/v1/x")) as url,
    ):
        for key in ("hush", "hush\r\n"):
            monkeypatch.setenv("OPENAI_API_KEY", key)
            with pytest.raises(ServerError, match=f"HTTP 302: redirects to '{other}.*not followed"):
                Client(url).complete("completions", {})
    assert elsewhere == [] and seen == [("POST", "Bearer hush")] * 2
    for key in ("hush\nhush", "hush\x7f", "hushé"):
        monkeypatch.setenv("OPENAI_API_KEY", key)
        with pytest.raises(ValueError, match="OPENAI_API_KEY") as caught:
            Client("http://localhost")
        assert "hush" not in str(caught.value)


def test_a_reply_has_limits_of_size_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_SECONDS", 0.4)
    for begin, piece in ((b"200 OK\r\n\r\n", b" "), (b"200 OK\r\n", b"X-A: a\r\n")):
        with serving(pouring(begin, piece, pause=0.05)) as url:
            start = time.monotonic()
            with pytest.raises(OSError, match="no whole answer in 0.4 seconds"):
                Client(url).complete("completions", {})
            assert time.monotonic() - start < 4
    monkeypatch.setattr(client, "_SECONDS", 60.0)
    monkeypatch.setattr(client, "MAX_REPLY_BYTES", 1 << 20)
    for respond, kind, message in (
        (pouring(b"200 OK\r\n\r\n", b"no " * 65536), ValueError, "larger than 1 MiB"),
        (pouring(b"500 No\r\n\r\n", b"no " * 65536), ServerError, "HTTP 500: no no"),
        (sending(b"\x1f\x8b bomb", Content_Encoding="gzip"), ValueError, "no completion"),
    ):
        with serving(respond) as url, pytest.raises(kind, match=message) as caught:
            Client(url).complete("completions", {})
        assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b'{"error": {"message": "a\\u001b]0;x\\u0007\\u202e b\\n\\nc"}}', "a\ufffd]0;x\ufffd\ufffd b c"),
        (b'{"error": {"message": {"a": "\\ud800"}}}', '{"error": '),
        (b'{"message": "older"}', "older"),
        (b'{"error": "short"}', "short"),
        (b"[" * 4000, "[[["),
        (b"\xff\xfe\x1b[31mred\x1b[0m\x00", "\ufffd\ufffd\ufffd[31mred"),
        (b"", "Service Unavailable"),
    ],
)
def test_errors_are_one_printable_line(data: bytes, words: str) -> None:
    with serving(sending(data, 503)) as url, pytest.raises(ServerError) as caught:
        Client(url).complete("completions", {})
    assert str(caught.value).startswith(f"HTTP 503: {words}") and len(str(caught.value)) < 400
    assert caught.value.code == 503 and str(caught.value).isprintable()


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
WRONG = [*VALUES, [-1], [2**80], [1.0], [True], {"content": [1]}, {"tokens": 1}]


def test_wrong_replies_are_rows_or_one_line() -> None:
    """Valid replies with one to three values changed, and broken texts: a row that can be written, or a refusal."""
    chance, num_refused = random.Random(SEED), 0
    deep = b'{"choices": [{"text": "a", "x": ' + b"[" * 3000 + b"]" * 3000 + b"}]}"
    replies = [deep, b"[" * 200_000, b"", b"null", b"\xff", b'{"choices": ', b'{"choices": [{"text": "\\udc00"}]}']
    for _ in range(NUM_WRONG):
        wrong: Any = chance.choice(VALID)
        for _ in range(chance.randint(1, 3)):
            wrong = mutated(wrong, chance, WRONG)
        replies.append(json.dumps(wrong).encode())
    item = WantedAnswer(Row(id="p", messages=tuple(chat("Why?"))), 0, SamplingParams())
    for data in replies:
        try:
            reply = validated(Reply, data, "the reply is no completion")
        except ValueError as error:
            assert str(error).isprintable() and len(str(error)) < 400, data
            num_refused += 1
            continue
        json.dumps(row_of(item, reply, reply.num_tokens), ensure_ascii=False, allow_nan=False).encode()
        for number in (reply.num_tokens, *reply.prompt_ids, *reply.token_ids):
            assert type(number) is int and 0 <= number < 2**31, data
    assert 200 < num_refused < len(replies) - 100, num_refused


def test_a_reply_is_read_in_every_form() -> None:
    """vLLM's and SGLang's names and places; null is an absent field."""
    chat, completion = (Reply.model_validate(reply | {"system_fingerprint": None}) for reply in VALID)
    assert (chat.text, chat.has_parts, chat.num_tokens) == ("ab", True, 2)
    assert (chat.prompt_ids, chat.token_ids, chat.logprobs) == ([1, 2], [3, 4], [])
    assert (completion.text, completion.finish_reason) == ("ab", "length")
    assert (completion.prompt_ids, completion.token_ids, completion.logprobs) == ([1], [3, 4], [-1.0, -2.0])
    message = {"content": None, "tool_calls": [CALL], "reasoning": None}
    nothing = {"message": message, "token_ids": None, "logprobs": None}
    found = Reply.model_validate({"choices": [nothing], "usage": None})
    assert (found.text, found.has_parts, found.token_ids, found.finish_reason) == ("", True, [], "stop")
    for broken in ({"choices": []}, [], {"choices": [{"message": "x"}]}, {"choices": [{"message": {}}]}):
        with pytest.raises(ValueError):
            Reply.model_validate(broken)
