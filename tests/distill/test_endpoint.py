"""An OpenAI-compatible server: retries, refusals, interruptions, against a real socket."""

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from drafter.cli.distill import DistillOptions
from drafter.distill import endpoint
from drafter.distill.endpoint import Endpoint
from drafter.distill.prompts import AnswerSettings
from drafter.distill.run import NO_ANSWER, distill
from tests.data.tiny import chat, write_jsonl
from tests.distill.loopback import send, serving
from tests.distill.test_local import rows_of

Reply = tuple[int, object]


def answer_of(body: dict) -> object:
    """The text shows the prompt, and what an answer depends on."""
    text = f"{body['messages'][-1]['content']} {body['temperature']} {body['seed']}"
    return {"choices": [{"message": {"content": text}, "finish_reason": "length"}], "usage": {"completion_tokens": 7}}


class FakeServer:
    """Answers by ``reply(body, how often this prompt came)``, and keeps the requests."""

    url = ""

    def __init__(self) -> None:
        self.reply: Callable[[dict, int], Reply] = lambda body, count: (200, answer_of(body))
        self.bodies: list[dict] = []

    def __call__(self, handler: BaseHTTPRequestHandler, data: bytes) -> None:
        body = json.loads(data)
        self.bodies.append(body)
        status, payload = self.reply(body, self.counts[body["messages"][-1]["content"]])
        send(handler, status, json.dumps(payload).encode())

    @property
    def counts(self) -> Counter[str]:
        """How often each prompt came."""
        return Counter(body["messages"][-1]["content"] for body in self.bodies)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    monkeypatch.setattr(endpoint, "_PAUSE", 0.01)
    fake = FakeServer()
    with serving(fake) as fake.url:
        yield fake


def refusing(status: int, message: str, *prompts: str) -> Callable[[dict, int], Reply]:
    """A server that refuses these prompts, or all without any, and answers the others."""
    refusal = (status, {"error": {"message": message}})
    return lambda body, _: (
        refusal if body["messages"][-1]["content"] in prompts or not prompts else (200, answer_of(body))
    )


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    return write_jsonl(tmp_path / "prompts.jsonl", [{"id": str(i), "prompt": f"Q{i}"} for i in range(12)])


def run(server: FakeServer, prompts: str, out: Path, concurrency: int = 4, **options):
    return distill(Endpoint(server.url, "tiny", concurrency), prompts, out, AnswerSettings(9, **options))


def answered(out: Path) -> dict[str, str]:
    return {name: row["messages"][-1]["content"] for (name, _), row in rows_of(out).items()}


def test_every_prompt_is_answered_once(server: FakeServer, prompts: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "hush")
    four = threading.Barrier(4, timeout=30)  # requests that wait for each other
    server.reply = lambda body, count: (200 + 0 * four.wait(), answer_of(body))
    report = run(server, prompts, tmp_path / "out.jsonl", temperature=(0.0, 0.7), top_k=5, min_p=0.1)
    assert set(server.counts.values()) == {1} and len(server.counts) == 12
    assert (report.num_new, report.num_tokens) == (12, 84)
    assert report.notes["new answers cut at --max-new-tokens"] == 12
    assert answered(tmp_path / "out.jsonl")["3"].startswith("Q3 0.")
    body = server.bodies[0]
    assert body["model"] == "tiny" and body["max_tokens"] == 9 and body["top_k"] == 5 and body["min_p"] == 0.1
    assert "top_p" not in body and body["messages"] == chat(body["messages"][0]["content"])
    assert "hush" not in (tmp_path / "out.jsonl.settings.json").read_text()


def test_addresses() -> None:
    for suffix in ("", "/", "/v1", "/v1/", "/v1/chat/completions"):
        assert Endpoint("http://host:1" + suffix, "m").chat_url == "http://host:1/v1/chat/completions"


def test_passing_failures_are_retried(server: FakeServer, prompts: str, tmp_path: Path) -> None:
    failures: list[Reply] = [(503, {"error": {"message": "busy"}}), (429, "no"), (200, {"choices": []})]
    server.reply = lambda body, count: failures[count - 1] if count <= 3 else (200, answer_of(body))
    assert run(server, prompts, tmp_path / "out.jsonl").num_new == 12 and set(server.counts.values()) == {4}


def test_a_server_that_stays_away_keeps_finished_answers(server: FakeServer, prompts: str, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    server.reply = refusing(503, "out of\nmemory", "Q7")
    with pytest.raises(OSError, match=r"no answer in 7 attempts .HTTP 503: out of memory.; finished answers"):
        run(server, prompts, out, concurrency=2)
    before = answered(out)
    assert "7" not in before and len(before) >= 5
    server.reply = lambda body, count: (200, answer_of(body))
    asked = server.counts
    report = run(server, prompts, out)
    assert report.num_done_before == len(before) and len(answered(out)) == 12
    assert all(server.counts[f"Q{key}"] == asked[f"Q{key}"] for key in before)
    assert {key: value for key, value in answered(out).items() if key in before} == before


def test_refused_prompts_are_counted_and_asked_again(server: FakeServer, prompts: str, tmp_path: Path, capsys) -> None:
    server.reply = refusing(400, "too long", "Q7", "Q9")
    report = run(server, prompts, tmp_path / "out.jsonl")
    assert report.notes[NO_ANSWER] == 2 and report.num_new == 10 and server.counts["Q7"] == 1
    assert capsys.readouterr().err.count("refuses a prompt: HTTP 400: too long") == 1
    before = (tmp_path / "out.jsonl").read_bytes()
    again = run(server, prompts, tmp_path / "out.jsonl")
    assert (again.num_done_before, again.num_new, again.notes[NO_ANSWER]) == (10, 0, 2)
    assert (tmp_path / "out.jsonl").read_bytes() == before
    for status, message in ((400, "no prompt was answered: 12 prompts without"), (404, "answers HTTP 404: why not")):
        server.reply = refusing(status, "why not")
        server.bodies.clear()
        with pytest.raises(OSError, match=message):
            run(server, prompts, tmp_path / f"{status}.jsonl")
        assert set(server.counts.values()) == {1}


def test_what_an_endpoint_cannot_do(server: FakeServer, prompts: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--prompts magpie needs --target"):
        distill(Endpoint(server.url, "m"), "magpie", tmp_path / "o.jsonl", num_prompts=3)
    text = write_jsonl(tmp_path / "text.jsonl", [{"text": "a"}])
    of_server: dict = {"out": tmp_path / "o.jsonl", "endpoint": "http://a"}
    for make, reason in (
        (partial(DistillOptions, out=tmp_path / "o.jsonl"), "no model answers"),
        (partial(DistillOptions, **of_server, target="t", drafter="d"), "a: the server answers, so leave --drafter"),
        (partial(DistillOptions, **of_server, ray="auto"), "http://a: the server answers"),
        (partial(Endpoint, "file:///etc/passwd", "m"), "must be an http or https address"),
        (partial(Endpoint, "http://me:hush@host", "m"), "^--endpoint holds a user name or a password: [^@]*$"),
        (partial(Endpoint, "http://host", ""), "needs --model"),
        (partial(run, server, text, tmp_path / "t.jsonl"), "line 1: plain text needs --target without --endpoint"),
    ):
        with pytest.raises(ValueError, match=reason):
            make()
    assert not server.bodies
    run(server, prompts, tmp_path / "o.jsonl")
    with pytest.raises(ValueError, match="written with endpoint_model = 'tiny', now it is 'm'"):
        distill(Endpoint(server.url, "m"), prompts, tmp_path / "o.jsonl", AnswerSettings(9))
