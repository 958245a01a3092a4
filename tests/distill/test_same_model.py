"""Token ids, reasoning and tool calls of other engines; and whether a server runs the target."""

import copy
import json
from pathlib import Path

import pytest
import torch

from drafter.distill.endpoint import Endpoint
from drafter.distill.run import NO_ANSWER, distill
from drafter.distill.same_model import compare_models
from drafter.engine.engine import Engine
from drafter.engine.settings import EngineConfig
from drafter.runtimes.loading import load_target, wrap_model
from tests.data.tiny import CHAT_TEMPLATE, chat, encode_rows, tiny_tokenizer, write_jsonl
from tests.distill.test_endpoint import FakeServer, answer_of, prompts, server
from tests.serving.live import Live, live_server
from tests.serving.tiny import tiny_target

__all__ = ["prompts", "server"]  # fixtures
PROMPTS = [chat("Why 15?"), chat("Why 16?")]


def plain_engine(template: str = CHAT_TEMPLATE, noise: float = 0.0) -> Engine:
    """An engine of the tiny target, perhaps with another template or with weights off by a share of their size."""
    model = copy.deepcopy(tiny_target().model)
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(1)
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * weight.std() * noise) if weight.ndim > 1 else None
    target = wrap_model(model, tiny_tokenizer(template), name="tiny")
    return Engine(target, None, EngineConfig(method="none", max_num_seqs=4, max_model_len=256))


def compare(live: Live) -> list[str]:
    return compare_models(Endpoint(live.url, "tiny"), tiny_target(), PROMPTS)


def test_differences_are_named_and_the_target_itself_has_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    differs = "warning: the server differs from the target: "
    with live_server() as live:
        (line,) = compare(live)
        assert line.startswith("the server runs the target: ") and int(line.split()[5]) > 4
        for part in tiny_target().model, tiny_tokenizer():
            part.save_pretrained(tmp_path)
        assert compare_models(Endpoint(live.url, "tiny"), load_target(str(tmp_path)), PROMPTS) == [line]
        params, hot = live.server._params, {"temperature": 3.0}
        monkeypatch.setattr(live.server, "_params", lambda body, ends: params(body.model_copy(update=hot), ends))
        (line,) = compare(live)
        assert line.startswith(differs + "sampling parameters: ")
    with live_server(plain_engine(CHAT_TEMPLATE.replace("<|user|>", "Q: "))) as live:
        (line,) = compare(live)
        assert line.startswith(differs + "chat template: from prompt token 1 on the server reads")
    with live_server(plain_engine(noise=0.1)) as live:
        assert any(line.startswith(f"{differs}dtype or quantisation: log-probabilities") for line in compare(live))
    is_another = pytest.raises(ValueError, match="does not serve 'tiny'; .*another")
    with live_server(plain_engine(noise=3.0)) as live, is_another:
        compare(live)


def test_ids_outside_the_vocabulary_are_one_line(server: FakeServer) -> None:
    choice = {"message": {"content": "x"}, "token_ids": [10**8], "finish_reason": "stop"}
    server.reply = lambda body, count: (200, {"choices": [choice], "prompt_token_ids": [1]})
    with pytest.raises(ValueError, match="token id 100000000 is outside the target's vocabulary of"):
        compare_models(Endpoint(server.url, "tiny"), tiny_target(), PROMPTS)


def test_a_server_without_the_field_is_asked_once(server: FakeServer, prompts: str, tmp_path: Path) -> None:
    refusal = {"error": {"message": "Unrecognized request argument supplied: return_token_ids"}}
    server.reply = lambda body, _: (400, refusal) if "return_token_ids" in body else (200, answer_of(body))
    report = distill(Endpoint(server.url, "tiny", concurrency=1), prompts, tmp_path / "o.jsonl")
    assert report.num_new == 12 and not report.notes[NO_ANSWER]
    assert sum("return_token_ids" in body for body in server.bodies) == 1
    assert "token_ids" not in json.loads((tmp_path / "o.jsonl").read_text().splitlines()[0])
    (line,) = compare_models(Endpoint(server.url, "tiny"), tiny_target(), PROMPTS)
    assert "gives no token ids" in line


@pytest.mark.parametrize("part", [{"reasoning": "Let me look."}, {"reasoning_content": "Hm."}, {"tool_calls": [{}]}])
def test_reasoning_and_tool_calls_need_token_ids(tmp_path: Path, server: FakeServer, part: dict) -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    prompts = write_jsonl(tmp_path / "p.jsonl", [{"id": "a", "prompt": "Rain?", "tools": tools}])
    choice = {"message": {"role": "assistant", "content": None, **part}, "finish_reason": "stop"}
    ids = {"prompt_token_ids": [1, 2], "token_ids": [3, 4]}
    server.reply = lambda body, count: (200, {"choices": [choice | ids]})
    distill(Endpoint(server.url, "m"), prompts, tmp_path / "o.jsonl")
    assert server.bodies[0]["tools"] == tools
    (encoded,) = encode_rows([json.loads((tmp_path / "o.jsonl").read_text())])
    assert encoded.token_ids == [1, 2, 3, 4] and not encoded.problem
    server.reply = lambda body, count: (200, {"choices": [choice]})
    with pytest.raises(OSError, match="separates reasoning or tool calls from the text and gives no token ids"):
        distill(Endpoint(server.url, "m"), prompts, tmp_path / "p2.jsonl")
    (foreign,) = encode_rows([{"messages": [*chat("Rain?"), choice["message"]]}])
    assert "has reasoning or tool calls and no token ids" in foreign.problem
