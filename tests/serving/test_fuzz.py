"""Whatever a client sends: an answer or a refusal in the API's shape, never a crash, never a hang."""

import json
import os
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from drafter.serving.protocol import ChatRequest, CompletionRequest
from tests.conftest import size
from tests.robustness.harness import VALUES, damaged, mutated
from tests.serving.live import MODEL, Live, live_server
from tests.serving.tiny import tiny_engine

_FIELDS = [
    *{**ChatRequest.model_fields, **CompletionRequest.model_fields}, "tools", "response_format", "logit_bias", "\ud800",
]  # fmt: skip
_PROMPTS: list[Any] = ["hi", [5, 6], ["a", "b"], [[7], [8, 9]]]
_EXTRAS: list[tuple[str, Any]] = [
    ("temperature", 0.7), ("top_p", 0.9), ("top_k", 5), ("min_p", 0.1), ("seed", 3), ("stop", ["a", "bc"]),
    ("n", 2), ("stream", True), ("ignore_eos", True), ("speculation", False), ("details", True),
]  # fmt: skip


@pytest.fixture(scope="module")
def small() -> Iterator[Live]:
    """Short rows, so that every answer is short."""
    engine = tiny_engine(max_num_seqs=2, max_model_len=64, beam_width=4, tree_size=8)
    with live_server(engine, max_queue=6) as server:
        yield server


def random_body(chance: random.Random, *, is_chat: bool) -> bytes:
    """A valid body with up to three things changed, added, left out or torn."""
    content = chance.choice(["hi", "a\nb", [{"type": "text", "text": "x"}]])
    asked = {"messages": [{"role": "user", "content": content}]} if is_chat else {"prompt": chance.choice(_PROMPTS)}
    extras = chance.sample([*_EXTRAS, ("logprobs", is_chat or 2)], chance.randint(0, 5))
    body: Any = {"model": MODEL, "max_tokens": chance.randint(1, 4), **asked, **dict(extras)}
    for _ in range(chance.randint(0, 3)):
        if chance.random() < 0.5 and isinstance(body, dict):
            body = body | {chance.choice(_FIELDS): chance.choice(VALUES)}
        else:
            body = mutated(body, chance)
    raw = json.dumps(body).encode()
    return damaged(raw, chance) if chance.random() < 0.2 else raw


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


@pytest.mark.timeout(3600)
def test_random_bodies(small: Live) -> None:
    server, num_bodies = small, size(250, 10_000)
    chance = random.Random(int(os.environ.get("ROBUSTNESS_SEED", "1")))
    counts: dict[int, int] = {}
    with server.http(headers={"Content-Type": "application/json"}, timeout=10) as http:
        for _ in range(num_bodies):
            is_chat = chance.random() < 0.5
            body = random_body(chance, is_chat=is_chat)
            response = http.post("/v1/chat/completions" if is_chat else "/v1/completions", content=body)
            check(response)
            counts[response.status_code] = counts.get(response.status_code, 0) + 1
        server.wait_until_idle()
    assert server.server.worker.state == "ready"
    assert server.metric("failed_steps_total", cause="error") == 0
    assert counts[200] > 20 and counts[400] > 20, "both sides of the line are reached"
