"""JSON requests to a server with OpenAI's protocol, and the fields that vLLM, SGLang and `drafter serve` add.

A server is a stranger: what it sends has limits of size and of time, no redirect is followed (the key of OPENAI_API_KEY
stays with the address that the user named), and every field that is read has a checked type and range. Whatever comes,
a call ends with a checked reply or with one of

    ServerError   an HTTP status other than 200, with the server's own reason in printable characters
    OSError       no connection, or no whole answer in time
    ValueError    an answer that is no completion, or larger than the limit

Use ``Client(url).complete(path, body)``, ``.get(address)`` and ``.model_card(model)``, from any thread.
"""

import asyncio
import email.utils
import json
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from drafter.utils.io import printable
from drafter.utils.key import key_header
from drafter.utils.parse import parse_json

if TYPE_CHECKING:
    import httpx

MAX_REPLY_BYTES = 64 << 20
MAX_COUNT = 10**9  # tokens, steps and ids: no server has more
_ERROR_BYTES = 4096
_CONNECT_SECONDS = 10.0
_IDS = "return_token_ids"  # field of vLLM and SGLang: the answer then holds token ids


class ServerError(Exception):
    """An HTTP status that is no success.

    Attributes:
        code: the status.
        reason: the server's message, in one printable line.
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
        timeout: seconds for one whole request.
        flag: the flag of the address, for errors.
    """

    url: str
    timeout: float = 600.0
    flag: str = "--endpoint"
    _has_no_ids: threading.Event = field(default_factory=threading.Event, repr=False, compare=False)

    def __post_init__(self) -> None:
        import httpx

        try:
            parts = httpx.URL(self.url)
            is_address = parts.scheme in ("http", "https") and bool(parts.host)
        except (httpx.InvalidURL, ValueError):
            is_address = False
        if not is_address:
            raise ValueError(
                f"{self.flag} {printable(self.url)!r} must be an http or https address, such as http://host:8000/v1"
            )
        key_header()

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
            ServerError, OSError, ValueError: see the module.
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
        return self._exchange("GET", address, None).decode("utf-8", errors="replace")

    def model_card(self, model: str | None = None) -> dict[str, Any]:
        """The entry of a model in the server's list; None: the first model.

        Returns:
            ``id`` and, where the server gives them in this form, ``owned_by`` (text), ``max_model_len`` and
            ``max_length`` (positive integers), ``speculation`` (truth value).

        Raises:
            ValueError: the server does not answer, or lists no such model.
        """
        try:
            cards = _cards_of(_json(self.get(self.address("models")).encode()))
        except ServerError as error:
            raise ValueError(f"{self.flag} {self.url} lists no models: {error}") from error
        except OSError as error:
            raise ValueError(f"{self.flag} {self.url}: the server does not answer ({error})") from error
        except ValueError as error:
            raise ValueError(f"{self.flag} {self.url} lists no models: no server with OpenAI's protocol?") from error
        names = [card["id"] for card in cards]
        if not names or (model is not None and model not in names):
            shown = printable(", ".join(names)) or "nothing"
            raise ValueError(f"--model {model} is not served at {self.url}: it serves {shown}")
        return cards[names.index(model) if model is not None else 0]

    def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        return _json(self._exchange("POST", self.address(path), body))

    def _exchange(self, method: str, address: str, body: Mapping[str, Any] | None) -> bytes:
        return asyncio.run(_exchange(method, address, body, self.timeout))


@cache
def _certificates() -> Any:
    import httpx

    return httpx.create_ssl_context()  # takes 20 ms


async def _exchange(method: str, address: str, body: Mapping[str, Any] | None, seconds: float) -> bytes:
    """Send a request; the bytes of the answer, within ``seconds`` and the limit of size."""
    import httpx

    headers = {"Accept-Encoding": "identity"} | key_header()
    content = None if body is None else json.dumps(body).encode()
    headers |= {} if body is None else {"Content-Type": "application/json"}
    limits = httpx.Timeout(None, connect=_CONNECT_SECONDS)
    try:
        async with (
            asyncio.timeout(seconds),
            httpx.AsyncClient(follow_redirects=False, timeout=limits, verify=_certificates()) as http,
            http.stream(method, address, content=content, headers=headers) as response,
        ):
            if response.status_code != httpx.codes.OK:
                raise await _refusal(response)
            if response.headers.get("Content-Encoding", "").strip().lower() not in ("", "identity"):
                raise ValueError("the reply is packed, which the request did not allow")
            parts = bytearray()
            async for part in response.aiter_raw():
                parts += part
                if len(parts) > MAX_REPLY_BYTES:
                    raise ValueError(f"the reply is larger than {MAX_REPLY_BYTES >> 20} MiB")
            return bytes(parts)
    except TimeoutError as error:
        raise TimeoutError(f"no whole answer in {seconds:g} seconds") from error
    except (httpx.HTTPError, httpx.StreamError, httpx.InvalidURL) as error:
        raise OSError(printable(f"{type(error).__name__}: {error}")) from error


async def _refusal(response: "httpx.Response") -> ServerError:
    """The error of a status; a redirect is one."""
    reason = response.reason_phrase
    if response.is_redirect:
        place = printable(response.headers.get("Location", ""), 200)
        return ServerError(response.status_code, f"redirects to {place!r}, which is not followed: name that address")
    data = b""
    async for part in response.aiter_raw():
        data += part
        if len(data) > _ERROR_BYTES:
            break
    text = data[:_ERROR_BYTES].decode("utf-8", errors="replace")
    try:
        found = parse_json(data, "the reply")
        found = found.get("error", found)
        text = found["message"] if isinstance(found, dict) else found
    except (ValueError, KeyError, AttributeError):
        pass  # not OpenAI's form: the text as it came
    return ServerError(response.status_code, printable(str(text)) or printable(reason), _retry_after(response))


def _retry_after(response: "httpx.Response") -> float:
    """Seconds of the header Retry-After, which holds a number or a date; 0 without the header."""
    value = response.headers.get("Retry-After", "").strip()
    if value.isascii() and value.isdecimal():
        return float(value)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return 0.0


# -- checked values of replies --------------------------------------------------------------------------------------


class Reply(NamedTuple):
    """One answer of a chat or of a completion.

    Attributes:
        text: without reasoning and tool calls, if the server separates them from the text.
        finish_reason: the server's own word.
        num_prompt_tokens, num_tokens: tokens of prompt and answer; 0 if the server does not count.
        prompt_ids, token_ids: None if the server gives no token ids; at least 0, perhaps outside a vocabulary.
        reasoning: text of the reasoning; empty when there is none.
        tool_calls: in OpenAI's form.
        logprobs: text and natural logarithm of the probability of each token; None if the server gives none.
        whole: the whole response; ``choices`` is a list that begins with an object, other fields are unchecked.
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
        ValueError: the answer is no completion, or a field has another type or range.
    """
    choices = _typed(response, dict, "reply").get("choices")
    if not isinstance(choices, list) or not choices:
        raise ValueError("the reply is no completion: choices is no list with an entry")
    choice = _typed(choices[0], dict, "choice")
    message = _typed(choice.get("message"), dict, "message")
    if "content" not in message and "text" not in choice:
        raise ValueError("the reply is no completion: the choice has neither message nor text")
    usage = _typed(response.get("usage"), dict, "usage")
    calls = _typed(message.get("tool_calls"), list, "tool_calls")
    return Reply(
        _text(message["content"] if "content" in message else choice["text"], "text"),
        _text(choice.get("finish_reason"), "finish_reason") or "stop",
        _count(usage.get("prompt_tokens"), "usage.prompt_tokens"),
        _count(usage.get("completion_tokens"), "usage.completion_tokens"),
        _ids(response.get("prompt_token_ids") or choice.get("prompt_token_ids"), "prompt_token_ids"),
        _ids(choice.get("token_ids") or choice.get("response_token_ids"), "token_ids"),
        _text(message.get("reasoning_content") or message.get("reasoning"), "reasoning"),
        [_typed(call, dict, "tool call") for call in calls],
        _logprobs(_typed(choice.get("logprobs"), dict, "logprobs")),
        response,
    )


def _cards_of(value: Any) -> list[dict[str, Any]]:
    """Checked entries of the list of models; ValueError for another form."""
    cards = _typed(_typed(value, dict, "list of models").get("data"), list, "data")
    found = []
    for card in cards:
        if not isinstance(card, dict) or not isinstance(card.get("id"), str) or not card["id"]:
            raise ValueError("the list of models holds an entry without a name")
        kept: dict[str, Any] = {"id": card["id"]}
        if isinstance(card.get("owned_by"), str):
            kept["owned_by"] = card["owned_by"]
        if isinstance(card.get("speculation"), bool):
            kept["speculation"] = card["speculation"]
        for name in ("max_model_len", "max_length"):
            if type(card.get(name)) is int and 0 < card[name] <= MAX_COUNT:
                kept[name] = card[name]
        found.append(kept)
    return found


def _json(data: bytes) -> Any:
    """The value of a reply; ValueError for broken or deep JSON, infinite numbers, and half a surrogate pair."""
    value = parse_json(data, "the reply", only_depth=True)
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except ValueError as error:
        raise ValueError("the reply holds half a surrogate pair or a number that is not finite") from error
    return value


def _typed(value: Any, kind: type, name: str) -> Any:
    """The value, or an empty one for null; ValueError for another type."""
    if value is None:
        return kind()
    if not isinstance(value, kind):
        raise ValueError(f"the reply is no completion: {name} is {type(value).__name__}, not {kind.__name__}")
    return value


def _text(value: Any, name: str) -> str:
    text: str = _typed(value, str, name)
    return text


def _count(value: Any, name: str) -> int:
    """A number of tokens or steps; 0 for null."""
    if value is None:
        return 0
    if type(value) is not int or not 0 <= value <= MAX_COUNT:
        raise ValueError(f"the reply's {name} must be an integer from 0 to {MAX_COUNT:,}")
    return value


def _ids(value: Any, name: str) -> list[int] | None:
    """Token ids; None for null and for an empty list."""
    if value is None or value == []:
        return None
    if not isinstance(value, list) or not all(type(token) is int and 0 <= token <= MAX_COUNT for token in value):
        raise ValueError(f"the reply's {name} must be a list of token ids")
    return value


def _logprobs(value: Mapping[str, Any]) -> list[tuple[str, float]] | None:
    """Text and log-probability of each token, from a chat (list of objects) or a completion (parallel lists)."""
    if value.get("content"):
        entries = [_typed(entry, dict, "logprobs") for entry in _typed(value["content"], list, "logprobs")]
        pairs = [(entry.get("token"), entry.get("logprob")) for entry in entries]
    elif value.get("tokens"):
        texts, numbers = (_typed(value.get(name), list, "logprobs") for name in ("tokens", "token_logprobs"))
        if len(texts) != len(numbers):
            raise ValueError("the reply's logprobs have lists of different lengths")
        pairs = list(zip(texts, numbers, strict=True))
    else:
        return None
    for text, number in pairs:
        is_number = isinstance(number, int | float) and not isinstance(number, bool)
        if not isinstance(text, str) or not (is_number and -MAX_COUNT <= number <= MAX_COUNT):
            raise ValueError("the reply's logprobs must be pairs of text and finite number")
    return [(text, float(number)) for text, number in pairs]
