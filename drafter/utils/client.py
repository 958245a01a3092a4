"""JSON requests to a server with OpenAI's protocol, and the fields that vLLM, SGLang and `drafter serve` add.

A server is a stranger: what it sends has limits of size and of time, no redirect is followed (the key of OPENAI_API_KEY
stays with the address that the user named), and every field that is read has a checked type and range. A call ends with
a checked reply; OSError: no connection, no whole answer in time, or (ServerError) an HTTP status other than 200, with
the server's reason in printable characters; or ValueError: an answer that is no completion, or larger than the limit.
"""

import asyncio
import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any

from pydantic import AliasChoices, AliasPath, BaseModel, BeforeValidator, ConfigDict, FailFast, Field

from drafter.utils.io import printable
from drafter.utils.parse import validated

MAX_REPLY_BYTES = 64 << 20
MAX_COUNT = 10**9  # tokens, steps and ids: no server has more
_ERROR_BYTES = 4096
_SECONDS = 600.0  # for one whole request
_CONNECT_SECONDS = 10.0
_IDS = "return_token_ids"  # field of vLLM and SGLang: the answer then holds token ids


class ServerError(OSError):
    """An HTTP status ``code`` that is no success; ``reason``: the server's message, in one printable line."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"HTTP {code}: {reason}")
        self.code, self.reason = code, reason


@dataclass
class Client:
    """A server at an address such as http://host:8000 or https://host/v1."""

    url: str
    _wants_ids = True  # False after a server that refuses the field for token ids

    def __post_init__(self) -> None:
        import httpx

        parts = httpx.URL()
        with contextlib.suppress(httpx.InvalidURL, ValueError):
            parts = httpx.URL(self.url)
        if parts.userinfo:  # results and records of runs would show them
            raise ValueError(
                "--endpoint holds a user name or a password: give the address alone, and a key as OPENAI_API_KEY"
            )
        if parts.scheme not in ("http", "https") or not parts.host:
            raise ValueError(
                f"--endpoint {printable(self.url)!r} must be an http or https address, such as http://host:8000/v1"
            )
        key_header()

    def address(self, path: str) -> str:
        """The address of a path below /v1."""
        root = self.url.rstrip("/").removesuffix("/chat/completions").removesuffix("/v1")
        return f"{root}/v1/{path}"

    def complete(self, path: str, body: Mapping[str, Any]) -> "Reply":
        """The answer of ``chat/completions`` or ``completions``, with token ids where the server gives them; for any
        thread. A server that refuses the field for token ids by name is asked without it from then on.
        """
        wants_ids = self._wants_ids
        content = json.dumps({**body, _IDS: True} if wants_ids else body).encode()
        try:
            data = asyncio.run(_post(self.address(path), content))
        except ServerError as error:
            if not (wants_ids and error.code in (400, 422) and _IDS in error.reason):
                raise
            self._wants_ids = False
            return self.complete(path, body)
        return validated(Reply, data, "the reply is no completion")


def key_header() -> dict[str, str]:
    """The header with the key of OPENAI_API_KEY, if any; ValueError for a key that no header may hold."""
    key = os.environ.get("OPENAI_API_KEY", "").strip()
    if not (key.isascii() and key.isprintable()):  # httpx's own error would show the key
        raise ValueError("OPENAI_API_KEY holds a character that no key has, such as an end of line: set it again")
    return {"Authorization": f"Bearer {key}"} if key else {}


@cache
def _certificates() -> Any:
    import httpx

    return httpx.create_ssl_context()  # takes 20 ms


async def _post(address: str, content: bytes) -> bytes:
    """Send JSON; the bytes of the answer, within the limits of time and size."""
    import httpx

    headers = {"Accept-Encoding": "identity", "Content-Type": "application/json"} | key_header()
    limits = httpx.Timeout(None, connect=_CONNECT_SECONDS)
    data = bytearray()
    try:
        async with (
            asyncio.timeout(_SECONDS),
            httpx.AsyncClient(follow_redirects=False, timeout=limits, verify=_certificates()) as http,
            http.stream("POST", address, content=content, headers=headers) as response,
        ):
            is_success = response.status_code == httpx.codes.OK
            most = MAX_REPLY_BYTES if is_success else _ERROR_BYTES
            async for part in response.aiter_raw():
                data += part
                if len(data) > most:
                    break
    except TimeoutError as error:
        raise TimeoutError(f"no whole answer in {_SECONDS:g} seconds") from error
    except (httpx.HTTPError, httpx.StreamError, httpx.InvalidURL) as error:
        raise OSError(printable(f"{type(error).__name__}: {error}")) from error
    if not is_success:
        reason = data[:most].decode("utf-8", errors="replace")
        with contextlib.suppress(ValueError):  # not of OpenAI's form: the text as it came
            reason = validated(_Failure, bytes(data[:most]), "the reply").message
        if response.is_redirect:
            place = printable(response.headers.get("Location", ""), 200)
            reason = f"redirects to {place!r}, which is not followed: name that address"
        raise ServerError(response.status_code, printable(reason) or printable(response.reason_phrase))
    if len(data) > most:
        raise ValueError(f"the reply is larger than {most >> 20} MiB")
    return bytes(data)


# -- checked values of replies --------------------------------------------------------------------------------------


def _null_is(empty: Any) -> BeforeValidator:
    return BeforeValidator(lambda value: empty if value is None else value)


_Text = Annotated[str, _null_is("")]
_Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
_Logprob = Annotated[float, Field(ge=-MAX_COUNT, le=MAX_COUNT, allow_inf_nan=False)]
_Ids = Annotated[list[_Count], FailFast(), _null_is([])]  # one fault is enough: a list of faults would take gigabytes


def _choice(*names: str) -> AliasPath:
    return AliasPath("choices", 0, *names)


def _at(default: Any, *places: AliasPath) -> Any:
    """A field with the value at the first of the places that the reply has."""
    return Field(default, validation_alias=AliasChoices(*places))


class _Failure(BaseModel):
    """An error, in OpenAI's form or in an older one of vLLM."""

    message: str = _at(..., AliasPath("error", "message"), AliasPath("message"), AliasPath("error"))


class Reply(BaseModel):
    """The first choice of a chat or of a completion; no type is converted, and other fields are ignored.

    vLLM puts the prompt's ids beside the choices, SGLang into the choice.

    Attributes:
        message: of a chat; empty in a completion.
        text: without reasoning and tool calls, if the server separates them from the text.
        finish_reason: the server's own word.
        num_tokens: tokens of the answer; 0 if the server does not count.
        prompt_ids, token_ids: empty if the server gives no token ids; at least 0, perhaps outside a vocabulary.
        logprobs: natural logarithm of the probability of each token of a completion; empty if the server gives none.
    """

    model_config = ConfigDict(strict=True)
    message: Annotated[dict[str, Any], _null_is({})] = _at({}, _choice("message"))
    text: _Text = _at(..., _choice("message", "content"), _choice("text"))
    finish_reason: _Text = _at("stop", _choice("finish_reason"))
    num_tokens: Annotated[_Count, _null_is(0)] = _at(0, AliasPath("usage", "completion_tokens"))
    prompt_ids: _Ids = _at([], AliasPath("prompt_token_ids"), _choice("prompt_token_ids"))
    token_ids: _Ids = _at([], _choice("token_ids"), _choice("response_token_ids"))  # older SGLang
    logprobs: Annotated[list[_Logprob], FailFast(), _null_is([])] = _at([], _choice("logprobs", "token_logprobs"))

    @property
    def has_parts(self) -> bool:
        """Whether the server separated reasoning (by vLLM's name or SGLang's) or tool calls from the text."""
        return any(self.message.get(name) for name in ("reasoning", "reasoning_content", "tool_calls"))
