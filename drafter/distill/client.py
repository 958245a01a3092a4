"""JSON requests to a server with OpenAI's protocol, and the fields that vLLM, SGLang and `drafter serve` add."""

import email.utils
import http.client
import json
import os
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

_IDS = "return_token_ids"  # field of vLLM and SGLang: the answer then holds token ids


class ServerError(Exception):
    """An HTTP status that is an error.

    Attributes:
        code: the status.
        reason: the server's message, in one line.
        retry_after: seconds of the header Retry-After; 0 without the header.
    """

    def __init__(self, code: int, reason: str, retry_after: float = 0.0) -> None:
        super().__init__(f"HTTP {code}: {reason}")
        self.code, self.reason, self.retry_after = code, reason, retry_after


@dataclass(frozen=True)
class Client:
    """A server; the key of the variable OPENAI_API_KEY is sent if the variable is set.

    Attributes:
        url: address, such as http://host:8000 or https://host/v1.
        timeout: seconds for one request.
        flag: the flag of the address, for errors.
    """

    url: str
    timeout: float = 600.0
    flag: str = "--endpoint"
    _has_no_ids: threading.Event = field(default_factory=threading.Event, repr=False, compare=False)

    def __post_init__(self) -> None:
        parts = urllib.parse.urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ValueError(f"{self.flag} {self.url!r} must be an http or https address, such as http://host:8000/v1")

    @property
    def root(self) -> str:
        """The address without /v1."""
        return self.url.rstrip("/").removesuffix("/chat/completions").removesuffix("/v1")

    def address(self, path: str) -> str:
        """The address of a path below /v1."""
        return f"{self.root}/v1/{path}"

    def complete(self, path: str, body: Mapping[str, Any]) -> "Reply":
        """The answer of ``chat/completions`` or ``completions``, with token ids where the server gives them.

        A server that refuses the field for token ids by name is asked again without it, and is not asked for ids again.

        Raises:
            ServerError: the server refused.
            OSError, http.client.HTTPException, ValueError: no answer, or an answer that is no completion.
        """
        wants_ids = not self._has_no_ids.is_set()
        try:
            return read_reply(self._post(path, {**body, _IDS: True} if wants_ids else body))
        except ServerError as error:
            if not (wants_ids and error.code in (400, 422) and _IDS in error.reason):
                raise
        self._has_no_ids.set()
        return read_reply(self._post(path, body))

    def get(self, address: str) -> str:
        """The text at a whole address; errors as of :meth:`complete`."""
        return self._open(urllib.request.Request(address, headers=self._headers())).decode("utf-8", errors="replace")

    def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        headers = {"Content-Type": "application/json", **self._headers()}
        return json.loads(self._open(urllib.request.Request(self.address(path), json.dumps(body).encode(), headers)))

    def _open(self, request: urllib.request.Request) -> bytes:
        try:
            with urllib.request.urlopen(request, timeout=self.timeout) as response:
                data: bytes = response.read()
                return data
        except urllib.error.HTTPError as error:
            raise ServerError(error.code, _error_text(error), _retry_after(error)) from error

    def model_card(self, model: str | None = None) -> dict[str, Any]:
        """The entry of a model in the server's list; None: the first model.

        Raises:
            ValueError: the server does not answer, or lists no such model.
        """
        try:
            cards = json.loads(self.get(self.address("models")))["data"]
        except ServerError as error:
            raise ValueError(f"{self.flag} {self.url} lists no models: {error}") from error
        except (OSError, http.client.HTTPException) as error:
            raise ValueError(f"{self.flag} {self.url}: the server does not answer ({error})") from error
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{self.flag} {self.url} lists no models: no server with OpenAI's protocol?") from error
        names = [str(card.get("id")) for card in cards]
        if not names or (model is not None and model not in names):
            raise ValueError(f"--model {model} is not served at {self.url}: it serves {', '.join(names) or 'nothing'}")
        return dict(cards[names.index(model) if model is not None else 0])

    def _headers(self) -> dict[str, str]:
        key = os.environ.get("OPENAI_API_KEY")
        return {"Authorization": f"Bearer {key}"} if key else {}


class Reply(NamedTuple):
    """One answer of a chat or of a completion.

    Attributes:
        text: without reasoning and tool calls, if the server separates them from the text.
        finish_reason: the server's own word.
        num_prompt_tokens, num_tokens: tokens of prompt and answer; 0 if the server does not count.
        prompt_ids, token_ids: None if the server gives no token ids.
        reasoning: text of the reasoning; empty when there is none.
        tool_calls: in OpenAI's form.
        logprobs: text and natural logarithm of the probability of each token; None if the server gives none.
        whole: the whole response.
    """

    text: str
    finish_reason: str
    num_prompt_tokens: int
    num_tokens: int
    prompt_ids: list[int] | None
    token_ids: list[int] | None
    reasoning: str
    tool_calls: list[dict[str, Any]]
    logprobs: list[tuple[str, float]] | None
    whole: dict[str, Any]


def read_reply(response: Any) -> Reply:
    """The first choice of an answer.

    vLLM puts the prompt's ids beside the choices, SGLang into the choice; both call the answer's ids ``token_ids``
    (older SGLang ``response_token_ids``). vLLM calls the reasoning ``reasoning``, SGLang ``reasoning_content``.

    Raises:
        ValueError: the answer is no completion.
    """
    try:
        choice = response["choices"][0]
        message = choice.get("message") or {}
        text = message["content"] if "message" in choice else choice["text"]
        usage = response.get("usage") or {}
        prompt_ids = response.get("prompt_token_ids") or choice.get("prompt_token_ids")
        token_ids = choice.get("token_ids") or choice.get("response_token_ids")
        reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
        return Reply(
            str(text or ""),
            str(choice.get("finish_reason") or "stop"),
            int(usage.get("prompt_tokens") or 0),
            int(usage.get("completion_tokens") or 0),
            _ids(prompt_ids),
            _ids(token_ids),
            str(reasoning),
            [dict(call) for call in message.get("tool_calls") or ()],
            _logprobs(choice.get("logprobs")),
            response,
        )
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError("the reply is no completion") from error


def _ids(value: Any) -> list[int] | None:
    return [int(token) for token in value] if isinstance(value, Sequence) and value else None


def _logprobs(value: Any) -> list[tuple[str, float]] | None:
    """Text and log-probability of each token, from a chat (list of objects) or a completion (parallel lists)."""
    if not value:
        return None
    if value.get("content"):
        return [(str(entry["token"]), float(entry["logprob"])) for entry in value["content"]]
    if value.get("tokens"):
        return [(str(token), float(p)) for token, p in zip(value["tokens"], value["token_logprobs"], strict=True)]
    return None


def _error_text(error: urllib.error.HTTPError) -> str:
    """The server's error message, in one line."""
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
    """Seconds of the header Retry-After, which holds a number or a date; 0 without the header."""
    value = error.headers.get("Retry-After")
    if value is None:
        return 0.0
    if value.strip().isdigit():
        return float(value)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return 0.0
