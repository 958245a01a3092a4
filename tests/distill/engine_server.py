"""A server that speaks as vLLM or SGLang do, around a tiny target; every way to serve it wrong is a field."""

import json
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from itertools import count, cycle
from typing import Any, Literal

import torch

from drafter.targets.target import Target
from tests.distill.loopback import send, serving


@dataclass
class EngineServer:
    """Greedy answers of a target over HTTP.

    Attributes:
        target: what it runs.
        style: whose additions to the protocol it has; strict refuses unknown fields, as OpenAI does.
        template: chat template instead of the tokenizer's own.
        temperature: above 0, requests are sampled at it, whatever they ask for.
        max_length: longest prompt and answer.
        accepted: drafted tokens that the steps accept, in turn; empty: nothing is drafted.
        bodies: requests as they came, with their path.
    """

    target: Target
    style: Literal["vllm", "sglang", "strict"] = "vllm"
    template: str | None = None
    temperature: float = 0.0
    max_length: int = 10_000
    accepted: Sequence[int] = ()
    bodies: list[dict[str, Any]] = field(default_factory=list)
    counters: Counter[str] = field(default_factory=lambda: Counter({"generation_tokens_total": 0}))
    url: str = ""

    def __post_init__(self) -> None:
        self._draws = count()
        self._lock = threading.Lock()

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        self.bodies.append(body | {"path": path})
        if self.style == "strict" and "return_token_ids" in body:
            return 400, {"error": {"message": "Unrecognized request argument supplied: return_token_ids"}}
        is_chat = path.endswith("/chat/completions")
        prompt_ids = self._chat_ids(body) if is_chat else list(body["prompt"])
        if len(prompt_ids) + 1 > self.max_length:
            return 400, {"error": {"message": f"maximum context length is {self.max_length} tokens"}}
        limit = min(body["max_tokens"], self.max_length - len(prompt_ids))
        ids, logprobs = self._answer(prompt_ids, limit)
        is_stopped = ids[-1] in self.target.eos_token_ids
        text = self.target.decode(ids)
        choice: dict[str, Any] = {"index": 0, "finish_reason": "stop" if is_stopped else "length"}
        names = [self.target.decode([token], skip_special_tokens=False) for token in ids]
        if is_chat:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
            choice["logprobs"] = {"tokens": names, "token_logprobs": logprobs} if body.get("logprobs") else None
        usage = {"prompt_tokens": len(prompt_ids), "completion_tokens": len(ids)}
        reply = {"object": "chat.completion", "choices": [choice], "usage": usage}
        if body.get("return_token_ids") and self.style in ("vllm", "sglang"):
            choice["token_ids"] = ids
            (reply if self.style == "vllm" else choice)["prompt_token_ids"] = prompt_ids
        self._count(len(ids))
        return 200, reply

    def get(self, path: str) -> str:
        if path == "/metrics":
            return self._metrics()
        length = {"max_model_len": self.max_length} if self.style == "vllm" else {}
        return json.dumps({"data": [{"id": "tiny", "object": "model", "owned_by": self.style} | length]})

    def _chat_ids(self, body: dict[str, Any]) -> list[int]:
        encoded = self.target.tokenizer.apply_chat_template(
            body["messages"], tools=body.get("tools"), chat_template=self.template, add_generation_prompt=True
        )
        return list(encoded["input_ids"])

    @torch.no_grad()
    def _answer(self, prompt_ids: list[int], limit: int) -> tuple[list[int], list[float]]:
        ids, logprobs = list(prompt_ids), []
        generator = torch.Generator().manual_seed(next(self._draws))
        for _ in range(limit):
            hidden_BTD = self.target.forward(torch.tensor([ids])).hidden_BTD
            logprob_V = self.target.logits(hidden_BTD[0, -1]).float().log_softmax(-1)
            token = int(logprob_V.argmax())
            if self.temperature:
                token = int(torch.multinomial((logprob_V / self.temperature).exp(), 1, generator=generator))
            ids.append(token)
            logprobs.append(float(logprob_V[token]))
            if token in self.target.eos_token_ids:
                break
        return ids[len(prompt_ids) :], logprobs

    def _count(self, num_tokens: int) -> None:
        """The counters that vLLM keeps."""
        left, grown = num_tokens, Counter({"generation_tokens_total": num_tokens})
        steps = cycle(self.accepted)
        while self.accepted and left > 0:
            accepted = min(next(steps), left - 1)
            left -= accepted + 1
            grown += Counter({"spec_decode_num_drafts_total": 1, "spec_decode_num_accepted_tokens_total": accepted})
            for position in range(max(self.accepted)):
                grown[f'spec_decode_num_accepted_tokens_per_pos_total{{position="{position}"}}'] += accepted > position
        with self._lock:
            self.counters.update(grown)

    def _metrics(self) -> str:
        lines = [f"vllm:{name} {float(value)}\n" for name, value in self.counters.items()]
        return "".join(lines) if self.style == "vllm" else ""


@contextmanager
def running(server: EngineServer) -> Iterator[EngineServer]:
    """Serve on a loopback port, and stop at the end."""

    def respond(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        status, text = 200, ""
        if handler.command == "POST":
            status, reply = server.post(handler.path, json.loads(body))
            text = json.dumps(reply)
        else:
            text = server.get(handler.path)
        send(handler, status, text.encode())

    with serving(respond) as server.url:
        yield server
