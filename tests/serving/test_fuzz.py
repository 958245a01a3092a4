"""Whatever a client sends: an answer or a refusal in the API's shape, never a crash, never a hang."""

import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from drafter.serving.protocol import REFUSED
from tests.serving.live import MODEL, Live, live_server
from tests.serving.tiny import tiny_engine

_VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 5, 1e308, -0.0, 0.5, 1e-320, 2**31, 2**63, 2**64, -(2**63) - 1, 10**400, "", "x",
    "\ud800", "\udfff\ud800", "\x00", "\u202e", "\U0001f600" * 50, "<|end|>", "a" * 3000, "0", [], {}, [[]], [None],
    [0], ["", ""], [[1, 2], [3]], [1, "a"], {"type": "text"}, {"include_usage": True}, [{"role": "user"}],
    [{"role": "user", "content": None}], [{"type": "text", "text": "x"}], {"a": {"b": [1, {"c": None}]}}, float("nan"),
    float("inf"), [1] * 300, ["s"] * 20,
]  # fmt: skip
_FIELDS = [
    "model", "messages", "prompt", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p",
    "seed", "stop", "stop_token_ids", "n", "stream", "stream_options", "logprobs", "top_logprobs", "ignore_eos",
    "speculation", "details", "user", "metadata", *sorted(REFUSED),
]  # fmt: skip


@pytest.fixture(scope="module")
def small() -> Iterator[Live]:
    """Short rows, so that every answer is short."""
    engine = tiny_engine(max_num_seqs=2, max_model_len=64, beam_width=4, tree_size=8)
    with live_server(engine, max_queue=6) as server:
        yield server


def valid_body(chance: random.Random, *, is_chat: bool) -> dict[str, Any]:
    body: dict[str, Any] = {"model": MODEL, "max_tokens": chance.randint(1, 4)}
    if is_chat:
        body["messages"] = [{"role": "user", "content": chance.choice(["hi", "a\nb", [{"type": "text", "text": "x"}]])}]
    else:
        body["prompt"] = chance.choice(["hi", [5, 6], ["a", "b"], [[7], [8, 9]]])
    extras: list[tuple[str, Any]] = [
        ("temperature", 0.7), ("top_p", 0.9), ("top_k", 5), ("min_p", 0.1), ("seed", 3), ("stop", ["a", "bc"]),
        ("n", 2), ("stream", True), ("ignore_eos", True), ("speculation", False), ("details", True),
        ("logprobs", is_chat or 2),
    ]  # fmt: skip
    return body | dict(chance.sample(extras, chance.randint(0, 5)))


def mutate(value: Any, chance: random.Random) -> Any:
    """The same JSON value with something in it changed."""
    if isinstance(value, dict) and value and chance.random() < 0.8:
        name = chance.choice(list(value))
        return value | {name: mutate(value[name], chance)}
    if isinstance(value, list) and value and chance.random() < 0.6:
        place = chance.randrange(len(value))
        return [*value[:place], mutate(value[place], chance), *value[place + 1 :]]
    return chance.choice(_VALUES)


def random_body(chance: random.Random, *, is_chat: bool) -> bytes:
    body: Any = valid_body(chance, is_chat=is_chat)
    for _ in range(chance.randint(0, 3)):
        kind = chance.random()
        if kind < 0.5 and isinstance(body, dict):
            body = body | {chance.choice(_FIELDS): chance.choice(_VALUES)}
        elif kind < 0.6 and isinstance(body, dict) and body:
            body = {name: value for name, value in body.items() if name != chance.choice(list(body))}
        else:
            body = mutate(body, chance)
    raw = bytearray(json.dumps(body).encode())
    if chance.random() < 0.2:
        for _ in range(chance.randint(1, 4)):
            place = chance.randrange(len(raw) + 1)
            raw[place : place + chance.randint(0, 3)] = chance.choice(
                [b"", b"\x00", b"\xff", b"{", b"]", b'"', b"9", b"\\u"]
            )
    return bytes(raw)


def check(response: httpx.Response) -> None:
    assert response.status_code in (200, 400, 404, 413, 429), (response.status_code, response.text[:500])
    if response.status_code != 200:
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["message"]
    elif response.headers["content-type"].startswith("text/event-stream"):
        *events, last, rest = response.text.split("\n\n")
        assert (last, rest) == ("data: [DONE]", "")
        assert all(json.loads(event.removeprefix("data: "))["object"] for event in events)
    else:
        assert response.json()["choices"]


def test_random_bodies(small: Live) -> None:
    server, num_bodies, chance = small, 250, random.Random(1)
    counts: dict[int, int] = {}
    with server.http(headers={"Content-Type": "application/json"}, timeout=30) as http:
        for _ in range(num_bodies):
            is_chat = chance.random() < 0.5
            body = random_body(chance, is_chat=is_chat)
            response = http.post("/v1/chat/completions" if is_chat else "/v1/completions", content=body)
            check(response)
            counts[response.status_code] = counts.get(response.status_code, 0) + 1
        server.wait_until_idle()
        body = json.dumps({"model": MODEL, "prompt": "hi", "max_tokens": 2}).encode()
        assert http.post("/v1/completions", content=body).status_code == 200
    assert server.server.worker.state == "ready"
    assert server.metric("failed_steps_total", cause="error") == 0
    assert counts[200] > 20 and counts[400] > 20, "both sides of the line are reached"


@pytest.mark.parametrize("size", [1, 4000, 40_000])
def test_odd_texts_become_tokens_or_refusals(small: Live, size: int) -> None:
    with small.http() as http:
        family = "\U0001f468\u200d\U0001f469"
        for text in ("a", " ", "\n", "\u20ac", family, "<|user|>", "\x00", "e\u0301", "\ufffd", "ab " * 3):
            body = {"model": MODEL, "prompt": text * (size // len(text.encode()) or 1), "max_tokens": 2}
            response = http.post("/v1/completions", content=json.dumps(body, ensure_ascii=False).encode(),
                                 headers={"Content-Type": "application/json"})  # fmt: skip
            assert response.status_code in (200, 400, 413)
