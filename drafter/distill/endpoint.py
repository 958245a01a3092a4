"""Answers from any OpenAI-compatible server: a cluster's own vLLM or SGLang makes the training data."""

import email.utils
import http.client
import json
import os
import queue
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from drafter.distill.jobs import Answer, AnswerSettings, Job

_RETRYABLE = {408, 409, 425, 429, 500, 502, 503, 504, 529}
_REFUSED = {400, 413, 422}  # this prompt cannot be answered (too long, filtered); others can
_MAX_REFUSED_AT_START = 8


class EndpointError(OSError):
    """The server cannot be used: wrong address, model or key, or no answer after all retries."""


@dataclass(frozen=True)
class Endpoint:
    """A server that speaks the chat completions protocol.

    Attributes:
        url: such as http://host:8000 or https://host/v1.
        model: the name it serves the target under.
        concurrency: requests in flight.
        retries: further attempts after a failed one, each after twice the pause.
        timeout: seconds for one attempt.
        pause: seconds before the first further attempt.
        api_key_variable: environment variable that holds the key, if the server wants one.
    """

    url: str
    model: str
    concurrency: int = 16
    retries: int = 6
    timeout: float = 600.0
    pause: float = 1.0
    api_key_variable: str = "OPENAI_API_KEY"

    def __post_init__(self) -> None:
        parts = urllib.parse.urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ValueError(f"--endpoint {self.url!r} must be an http or https address, such as http://host:8000/v1")
        if not self.model:
            raise ValueError("--endpoint needs --model, the name that the server knows the target by")
        if self.concurrency < 1:
            raise ValueError(f"--concurrency {self.concurrency} must be at least 1")
        if self.retries < 0:
            raise ValueError(f"--retries {self.retries} must be at least 0")

    @property
    def identity(self) -> dict[str, Any]:
        """What decides about the answers (the address does not: servers move)."""
        return {"endpoint_model": self.model}

    @property
    def chat_url(self) -> str:
        base = self.url.rstrip("/").removesuffix("/chat/completions")
        return f"{base if base.endswith('/v1') else base + '/v1'}/chat/completions"

    def answer(
        self, jobs: Sequence[Job], settings: AnswerSettings, *, num_answered_before: int = 0
    ) -> Iterator[tuple[Job, Answer | None]]:
        """Yield jobs with their answers as they come; None where the server refused this prompt.

        Args:
            num_answered_before: answers with these settings that earlier runs got.

        Raises:
            EndpointError: see there; what was yielded before stays valid.
        """
        todo: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        done: queue.SimpleQueue[tuple[Job, Answer | _Refused | BaseException]] = queue.SimpleQueue()
        for job in jobs:
            todo.put(job)
        stop = threading.Event()

        def work() -> None:
            while not stop.is_set():
                job = todo.get()
                if job is None:
                    return
                try:
                    done.put((job, self._ask(job, settings, stop)))
                except BaseException as error:  # a bug: the reader waits for every job and is to raise it
                    done.put((job, error))
                    return

        # Daemons: Ctrl-C does not wait for answers that nobody will read.
        for _ in range(min(self.concurrency, len(jobs))):
            threading.Thread(target=work, daemon=True).start()
            todo.put(None)
        num_refused = num_answered = 0
        # Where earlier runs got answers, the prompts they were refused come again, perhaps nothing else. Only a server
        # that refuses more than it ever answered is taken for one that refuses everything.
        limit = min(_MAX_REFUSED_AT_START, len(jobs))
        if num_answered_before:
            limit = max(_MAX_REFUSED_AT_START, num_answered_before + 1)
        try:
            for _ in jobs:
                job, result = done.get()
                if isinstance(result, BaseException):
                    raise result
                num_refused += isinstance(result, _Refused)
                num_answered += isinstance(result, Answer)
                if isinstance(result, _Refused):
                    if not num_answered and num_refused >= limit:
                        raise EndpointError(f"{self.chat_url} refuses every prompt: {result.reason}")
                    yield job, None
                else:
                    yield job, result
        finally:
            stop.set()

    def _ask(self, job: Job, settings: AnswerSettings, stop: threading.Event) -> "Answer | _Refused | EndpointError":
        problem = ""
        for attempt in range(self.retries + 1):
            wait = self.pause * 2**attempt
            try:
                return _parse(self._post(_body(self.model, job, settings)))
            except urllib.error.HTTPError as error:
                reason = _error_text(error)
                problem = f"HTTP {error.code}: {reason}"
                if error.code in _REFUSED:
                    return _Refused(problem)
                if error.code not in _RETRYABLE:
                    return EndpointError(f"{self.chat_url} answers {problem}")
                wait = max(wait, _retry_after(error))
            except (OSError, http.client.HTTPException, ValueError) as error:
                problem = f"{type(error).__name__}: {error}"
            if attempt < self.retries and stop.wait(min(wait, 60.0)):
                break
        return EndpointError(
            f"{self.chat_url} gives no answer after {self.retries + 1} attempts ({problem}); finished answers are "
            "kept, run the same command again to go on"
        )

    def _post(self, body: dict[str, Any]) -> Any:
        headers = {"Content-Type": "application/json"}
        key = os.environ.get(self.api_key_variable)
        if key:
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(self.chat_url, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=self.timeout) as response:
            return json.loads(response.read())


@dataclass(frozen=True)
class _Refused:
    reason: str


def _body(model: str, job: Job, settings: AnswerSettings) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": model,
        "messages": list(job.prompt.messages),
        "max_tokens": settings.max_new_tokens,
        "temperature": job.temperature,
        "seed": job.seed % 2**31,
    }
    if settings.top_p < 1:
        body["top_p"] = settings.top_p
    # Not of the protocol, but known to the usual servers; sent only when asked for.
    if settings.top_k:
        body["top_k"] = settings.top_k
    if settings.min_p:
        body["min_p"] = settings.min_p
    return body


def _parse(response: Any) -> Answer:
    """ValueError when the server's reply is not one of the protocol (it is then asked again)."""
    try:
        choice = response["choices"][0]
        text = choice["message"]["content"] or ""
        num_tokens = int((response.get("usage") or {}).get("completion_tokens") or 0)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError("the reply is no chat completion") from error
    return Answer(str(text), "length" if choice.get("finish_reason") == "length" else "stop", num_tokens)


def _error_text(error: urllib.error.HTTPError) -> str:
    """The server's own words, in one line."""
    try:
        text = error.read(2000).decode("utf-8", errors="replace")
    except (OSError, http.client.HTTPException):
        return str(error.reason)
    try:
        found = json.loads(text)
        text = found["error"]["message"] if "error" in found else found["message"]
    except (ValueError, KeyError, TypeError):
        return " ".join(text.split())[:300] or str(error.reason)
    return " ".join(str(text).split())[:300]


def _retry_after(error: urllib.error.HTTPError) -> float:
    """Seconds the server asks to wait, from a number or a date; 0 if it says nothing."""
    value = error.headers.get("Retry-After")
    if value is None:
        return 0.0
    if value.strip().isdigit():
        return float(value)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return 0.0
