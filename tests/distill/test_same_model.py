"""Token ids, reasoning and tool calls of other engines; and whether a server runs the target."""

import json
from pathlib import Path

import pytest
import torch

from drafter.data.encode import RowEncoder, encode_files
from drafter.decoding.params import SamplingParams
from drafter.distill.client import Client
from drafter.distill.endpoint import Endpoint
from drafter.distill.prompts import AnswerSettings
from drafter.distill.run import NO_ANSWER, distill
from drafter.distill.same_model import Comparison, compare_models
from drafter.targets.target import Target
from tests.data.tiny import CHAT_TEMPLATE, chat, encode_rows, tiny_tokenizer, write_jsonl
from tests.distill.engine_server import EngineServer, running
from tests.distill.test_endpoint import FakeServer, server
from tests.serving.live import live_server
from tests.serving.tiny import tiny_engine as plain_engine
from tests.serving.tiny import tiny_target as served_target
from tests.training.fakes import make_target

__all__ = ["server"]  # a fixture
PROMPTS = [chat("Why 15?"), chat("Why 16?")]


@pytest.fixture(scope="module")
def target() -> Target:
    return make_target()


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setenv("DRAFTER_HOME", str(tmp_path / "home"))


def compare(engine: EngineServer, target: Target) -> Comparison:
    with running(engine):
        return compare_models(Client(engine.url), "tiny", target, PROMPTS)


def test_the_target_itself_has_no_difference(target: Target) -> None:
    found = compare(EngineServer(target, "vllm"), target)
    assert not found.lines and not found.is_other_model and found.num_tokens > 4


def test_a_server_without_token_ids_is_not_compared(target: Target) -> None:
    assert compare(EngineServer(target, "strict"), target) == Comparison(0, [], False)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"template": CHAT_TEMPLATE.replace("<|user|>", "Q: ")},
            "chat template: from prompt token 1 on the server reads",
        ),
        ({"temperature": 3.0}, "sampling parameters: "),
    ],
)
def test_one_difference_is_named(target: Target, changes: dict, line: str) -> None:
    found = compare(EngineServer(target, **changes), target)
    assert len(found.lines) == 1 and found.lines[0].startswith(line), found


def noisy(target: Target, share: float) -> Target:
    """The same model with rounded weights: off by a share of each matrix' size."""
    other = make_target()
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(1)
        for weight in other.model.parameters():
            weight.add_(torch.randn_like(weight) * weight.std() * share) if weight.ndim > 1 else None
    return Target.from_model(other.model, other.tokenizer, name="other")


def test_rounded_weights_and_another_model(target: Target) -> None:
    rounded = compare(EngineServer(noisy(target, 0.1)), target)
    assert not rounded.is_other_model
    assert any(line.startswith("dtype or quantisation: log-probabilities differ by") for line in rounded.lines)
    assert compare(EngineServer(noisy(target, 3.0)), target).is_other_model


def test_ids_outside_the_vocabulary_are_one_line(target: Target, server: FakeServer) -> None:
    choice = {"message": {"content": "x"}, "token_ids": [10**8], "finish_reason": "stop"}
    server.reply = lambda body, count: (200, {"choices": [choice], "prompt_token_ids": [1]}, {})
    with pytest.raises(ValueError, match="token id 100000000 is outside the vocabulary of"):
        compare_models(Client(server.url), "tiny", target, PROMPTS)


def test_our_own_server_runs_its_target_and_gives_its_tokens(tmp_path: Path) -> None:
    prompts = write_jsonl(tmp_path / "p.jsonl", [{"id": str(i), "prompt": f"Why {i}?"} for i in range(3)])
    with live_server() as live:
        found = compare_models(Client(live.url), "tiny", served_target(), PROMPTS)
        endpoint = Endpoint(live.url, "tiny")
        distill(endpoint, prompts, tmp_path / "o.jsonl", AnswerSettings(9))
        with live.http() as http:
            body = {"model": "tiny", "messages": chat("Why?"), "return_token_ids": True, "stream": True}
            assert "only for whole answers" in http.post("/v1/chat/completions", json=body).json()["error"]["message"]
    for row in map(json.loads, (tmp_path / "o.jsonl").read_text().splitlines()):
        (alone,) = plain_engine(method="none", tree_size=1).generate(
            [row["messages"][:-1]], SamplingParams(max_new_tokens=9)
        )
        assert row["token_ids"] == alone.token_ids and row["prompt_token_ids"] == alone.prompt_ids
    assert not found.lines and found.num_tokens > 0


@pytest.mark.parametrize("style", ["vllm", "sglang"])
def test_rows_hold_the_engines_own_tokens(target: Target, style: str, tmp_path: Path) -> None:
    """Another template on the server: training sees what the server saw, and needs no template."""
    prompts = write_jsonl(tmp_path / "p.jsonl", [{"id": str(i), "prompt": f"Why {i}?"} for i in range(6)])
    template = CHAT_TEMPLATE.replace("<|user|>", "Q: ")
    with running(EngineServer(target, style, template=template)) as engine:
        endpoint = Endpoint(engine.url, "tiny", concurrency=2)
        distill(endpoint, prompts, tmp_path / "out.jsonl", AnswerSettings(9), num_prompts=4)
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    tokenizer = tiny_tokenizer(template)
    encoded, report = encode_files([str(tmp_path / "out.jsonl")], RowEncoder(tiny_tokenizer(None)))
    assert report[0].startswith("4 of 4 rows kept") and len(report) == 1
    for number, row in enumerate(rows):
        asked = tokenizer.apply_chat_template(row["messages"][:-1], add_generation_prompt=True)["input_ids"]
        assert row["prompt_token_ids"] == asked and target.decode(row["token_ids"]) == row["messages"][-1]["content"]
        token_T, loss_mask_T = encoded.row(number)
        assert token_T.tolist() == asked + row["token_ids"]
        assert loss_mask_T.tolist() == [False] * len(asked) + [True] * len(row["token_ids"])


def test_a_server_without_the_field_is_asked_once(target: Target, tmp_path: Path) -> None:
    prompts = write_jsonl(tmp_path / "p.jsonl", [{"id": str(i), "prompt": f"Why {i}?"} for i in range(6)])
    with running(EngineServer(target, "strict")) as engine:
        endpoint = Endpoint(engine.url, "tiny", concurrency=1, retries=0)
        report = distill(endpoint, prompts, tmp_path / "o.jsonl", AnswerSettings(4))
    assert report.num_new == 6 and not report.notes[NO_ANSWER]
    assert sum("return_token_ids" in body for body in engine.bodies) == 1
    assert "token_ids" not in json.loads((tmp_path / "o.jsonl").read_text().splitlines()[0])


@pytest.mark.parametrize("part", [{"reasoning": "Let me look."}, {"reasoning_content": "Hm."}, {"tool_calls": [{}]}])
def test_reasoning_and_tool_calls_need_token_ids(tmp_path: Path, server: FakeServer, part: dict) -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    prompts = write_jsonl(tmp_path / "p.jsonl", [{"id": "a", "prompt": "Rain?", "tools": tools}])
    choice = {"message": {"role": "assistant", "content": None, **part}, "finish_reason": "stop"}
    ids = {"prompt_token_ids": [1, 2], "token_ids": [3, 4]}
    server.reply = lambda body, count: (200, {"choices": [choice | ids]}, {})
    distill(Endpoint(server.url, "m"), prompts, tmp_path / "o.jsonl")
    assert server.bodies[0]["tools"] == tools
    (encoded,) = encode_rows([json.loads((tmp_path / "o.jsonl").read_text())])
    assert encoded.token_ids == [1, 2, 3, 4] and not encoded.problem
    server.reply = lambda body, count: (200, {"choices": [choice]}, {})
    with pytest.raises(OSError, match="separates reasoning or tool calls from the text and gives no token ids"):
        distill(Endpoint(server.url, "m"), prompts, tmp_path / "p2.jsonl")
    (foreign,) = encode_rows([{"messages": [*chat("Rain?"), choice["message"]]}])
    assert "has reasoning or tool calls and no token ids" in foreign.problem
