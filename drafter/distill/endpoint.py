"""Answers of an OpenAI-compatible server, such as vLLM or SGLang."""

import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from drafter.distill.client import Client, Reply, ServerError
from drafter.distill.prompts import AnswerSettings, AnswerStream, MadeAnswer, WantedAnswer

_RETRYABLE = {408, 409, 425, 429, 500, 502, 503, 504, 529}
_REFUSED = {400, 413, 422}  # the server refuses this prompt (too long, filtered) and may answer others
_MAX_REFUSED_AT_START = 8


class EndpointError(OSError):
    """The server is unusable: wrong address, model or key, or no answer after all retries."""


@dataclass(frozen=True)
class Endpoint:
    """A server with the chat completions API.

    Attributes:
        url: address, such as http://host:8000 or https://host/v1.
        model: the server's name for the target.
        concurrency: requests in flight.
        retries: further attempts after a failure; the pause doubles before each.
        timeout: seconds for one attempt.
        pause: seconds before the second attempt.
    """

    url: str
    model: str
    concurrency: int = 16
    retries: int = 6
    timeout: float = 600.0
    pause: float = 1.0

    def __post_init__(self) -> None:
        _ = self.client
        if not self.model:
            raise ValueError("--endpoint needs --model, the name that the server knows the target by")

    @property
    def identity(self) -> dict[str, Any]:
        """The settings that determine the answers, without the address."""
        return {"endpoint_model": self.model}

    @property
    def client(self) -> Client:
        return Client(self.url, self.timeout)

    @property
    def chat_url(self) -> str:
        return self.client.address("chat/completions")

    refusal: ClassVar[str] = "prompts refused by the server"

    def answer(
        self, wanted: Sequence[WantedAnswer], settings: AnswerSettings, *, num_answered_before: int = 0
    ) -> AnswerStream:
        """Yield each wanted answer with the made one, in order of arrival; None where the server refused the prompt.

        Args:
            wanted: answers to make.
            settings: sampling parameters.
            num_answered_before: answers with these settings from earlier runs.

        Raises:
            EndpointError: the server is unusable; answers yielded before stay valid.
        """
        todo: queue.SimpleQueue[WantedAnswer | None] = queue.SimpleQueue()
        done: queue.SimpleQueue[tuple[WantedAnswer, MadeAnswer | _Refused | BaseException]] = queue.SimpleQueue()
        for item in wanted:
            todo.put(item)
        stop = threading.Event()
        client = self.client

        def work() -> None:
            while not stop.is_set():
                item = todo.get()
                if item is None:
                    return
                try:
                    done.put((item, self._ask(client, item, settings, stop)))
                except BaseException as error:  # a bug: the reader waits for every item and raises the error
                    done.put((item, error))
                    return

        # Daemon threads: Ctrl-C does not wait for running requests.
        for _ in range(min(self.concurrency, len(wanted))):
            threading.Thread(target=work, daemon=True).start()
            todo.put(None)
        num_refused = num_answered = 0
        # A continued run repeats refused prompts first, so refusals alone do not show an unusable server: the limit
        # exceeds the number of earlier answers.
        limit = min(_MAX_REFUSED_AT_START, len(wanted))
        if num_answered_before:
            limit = max(_MAX_REFUSED_AT_START, num_answered_before + 1)
        try:
            for _ in wanted:
                item, result = done.get()
                if isinstance(result, BaseException):
                    raise result
                num_refused += isinstance(result, _Refused)
                num_answered += isinstance(result, MadeAnswer)
                if isinstance(result, _Refused):
                    if not num_answered and num_refused >= limit:
                        raise EndpointError(f"{self.chat_url} refuses every prompt: {result.reason}")
                    yield item, None
                else:
                    yield item, result
        finally:
            stop.set()

    def _ask(
        self, client: Client, item: WantedAnswer, settings: AnswerSettings, stop: threading.Event
    ) -> "MadeAnswer | _Refused | EndpointError":
        problem = ""
        body = _body(self.model, item, settings)
        for attempt in range(self.retries + 1):
            wait = self.pause * 2**attempt
            try:
                return _made(client.complete("chat/completions", body))
            except ServerError as error:
                problem = str(error)
                if error.code in _REFUSED:
                    return _Refused(problem)
                if error.code not in _RETRYABLE:
                    return EndpointError(f"{self.chat_url} answers {problem}")
                wait = max(wait, error.retry_after)
            except (OSError, ValueError) as error:
                problem = f"{type(error).__name__}: {error}"
            if attempt < self.retries and stop.wait(min(wait, 60.0)):
                break
        return EndpointError(
            f"{self.chat_url} gave no answer in {self.retries + 1} attempts ({problem}); finished answers are "
            "kept, run the same command again to continue"
        )


@dataclass(frozen=True)
class _Refused:
    reason: str


def _body(model: str, item: WantedAnswer, settings: AnswerSettings) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": model,
        "messages": list(item.prompt.messages),
        "max_tokens": settings.max_new_tokens,
        "temperature": item.temperature,
        "seed": item.seed % 2**31,
    }
    if item.prompt.tools:
        body["tools"] = list(item.prompt.tools)
    if settings.top_p < 1:
        body["top_p"] = settings.top_p
    # OpenAI has no such fields, but vLLM and SGLang do; sent only where the user asks for them.
    if settings.top_k:
        body["top_k"] = settings.top_k
    if settings.min_p:
        body["min_p"] = settings.min_p
    return body


def _made(reply: Reply) -> MadeAnswer:
    is_cut = reply.finish_reason == "length"
    return MadeAnswer(
        reply.text,
        "length" if is_cut else "stop",
        reply.num_tokens,
        reasoning=reply.reasoning,
        tool_calls=tuple(reply.tool_calls),
        prompt_ids=reply.prompt_ids if reply.token_ids else None,
        token_ids=reply.token_ids if reply.prompt_ids else None,
    )
