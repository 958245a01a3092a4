"""Requests and errors of the OpenAI API, without torch.

The server obeys the fields that the classes here declare, and ignores the fields of ``_IGNORED``. Any other field is
refused by name, unless its value asks for nothing: the field may ask for an answer that the engine does not offer.
"""

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal, NotRequired, TypeVar

from pydantic import BaseModel, Field, StrictBool, StrictInt, StrictStr, ValidationError, create_model, model_validator
from pydantic_core import PydanticCustomError
from starlette.exceptions import HTTPException
from typing_extensions import TypedDict

from drafter.decoding.params import MAX_BIASED, SamplingParams
from drafter.utils.io import first_line, printable
from drafter.utils.validate import range_of

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_STOP_LENGTH = 256  # characters; the search for the start of a longer stop string would be slow
MAX_TOP_LOGPROBS = 20
MAX_TOOLS = 128
TRY_LATER = {"Retry-After": "5"}  # seconds

# Fields that change no answer.
_IGNORED = {
    "user", "cache_prompt", "id_slot", "t_max_prompt_ms",
    "metadata", "store", "service_tier", "parallel_tool_calls", "prompt_cache_key", "safety_identifier",
    "priority", "name", "annotations", "description", "strict",
}  # fmt: skip

# Values that ask for nothing. A false or a 0 may ask for much: `add_special_tokens`.
_EMPTY: tuple[Any, ...] = (None, "", [], {})
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "tool_choice": ("none", "auto"), "function_call": ("none", "auto"),
    "modalities": (["text"],), "reasoning_effort": ("none",),
    "min_tokens": (0,), "no_repeat_ngram_size": (0,), "best_of": (1,), "length_penalty": (1,),
    "repeat_penalty": (1,), "typical_p": (1,), "tfs_z": (1,), "mirostat": (0,), "n_probs": (0,), "dynatemp_range": (0,),
    "dry_multiplier": (0,), "xtc_probability": (0,),
    "echo": (False,), "use_beam_search": (False,), "early_stopping": (False,), "continue_final_message": (False,),
    "include_stop_str_in_output": (False,), "return_tokens_as_token_ids": (False,), "return_tokens": (False,),
    "skip_special_tokens": (True,), "spaces_between_special_tokens": (True,), "add_special_tokens": (True,),
    "add_generation_prompt": (True,),
}  # fmt: skip


class ApiError(HTTPException):
    """An error response; ``message``: the mistake and its mend; ``param``: the wrong field; ``code``: for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        self.param, self.code = param, code

    @property
    def body(self) -> dict[str, Any]:
        """The API's JSON object of an error."""
        kind = "server_error" if self.status_code >= 500 else "invalid_request_error"
        kind = "rate_limit_error" if self.status_code == 429 else kind
        return {"error": {"message": self.detail, "type": kind, "param": self.param, "code": self.code}}


def told(error: Exception, names: Mapping[str, str]) -> str:
    """An error's first line for clients, who need not know where the server keeps its models.

    ``names``: the paths that the error may name, each with the name that clients know.
    """
    text = first_line(error)
    for path in sorted(names, key=len, reverse=True):
        text = text.replace(path, names[path])
    return text


def refusal(name: str, message: str, kind: str = "refused_parameter") -> PydanticCustomError:
    """An error of a field, whose name replaces ``{name}`` in the message."""
    return PydanticCustomError(kind, message, {"name": printable(name, 100)})


class _Body(BaseModel):
    """An object of which every field is obeyed, changes no answer, asks for nothing, or is refused by name."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_fields(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        known = {field.alias or name for name, field in cls.model_fields.items()} | _IGNORED
        for name in data:
            if name not in known and data[name] not in (*_EMPTY, *_NEUTRAL.get(name, ())):
                raise refusal(name, "'{name}' is not supported by this server: leave it out", "unsupported_parameter")
        return {name: value for name, value in data.items() if value is not None}  # null means the default


_Item = TypeVar("_Item")
_Many = Annotated[list[_Item], Field(min_length=1, fail_fast=True)]  # of a million wrong items, the first is an error
Text = Annotated[StrictStr, Field(max_length=2**31)]  # with a limit, half a surrogate pair is refused


# Parts of bodies as plain dicts; pydantic drops what is not named here.
class TextPart(TypedDict):
    type: Literal["text"]
    text: Text


class CalledFunction(TypedDict):
    name: Text
    arguments: Text  # JSON


class ToolCall(TypedDict):
    id: Text
    type: NotRequired[Literal["function"]]
    function: CalledFunction


class Function(TypedDict):
    name: Annotated[StrictStr, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: NotRequired[Text]
    parameters: NotRequired[dict[str, Any]]


class Tool(TypedDict):
    type: Literal["function"]
    function: Function


class StreamOptions(TypedDict):
    include_usage: NotRequired[StrictBool | None]


class JsonSchema(_Body):
    """The part of a response format that holds the schema."""

    json_schema: dict[str, Any] = Field(alias="schema")


class ResponseFormat(_Body):
    """What an answer of a chat must look like."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @property
    def structure(self) -> dict[str, Any]:
        """The engine's parameters."""
        schema = {"type": "object"} if self.json_schema is None else self.json_schema.json_schema
        return {} if self.type == "text" else {"json_schema": schema}

    @model_validator(mode="after")
    def _check_schema(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise refusal("json_schema", "{name} belongs to type json_schema, which needs it")
        return self


class Prediction(_Body):
    """Text that the answer probably repeats."""

    type: Literal["content"]
    content: Text | _Many[TextPart]


def _joined(content: str | list[TextPart]) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


class Message(_Body):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | _Many[TextPart] = ""
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS)] = []
    tool_call_id: Text | None = None

    @model_validator(mode="after")
    def _check_role(self) -> "Message":
        if self.tool_calls and self.role != "assistant":
            raise refusal("tool_calls", "{name} is for the role assistant")
        if "content" not in self.model_fields_set and not self.tool_calls:
            raise refusal("content", "{name} is missing")
        return self

    @property
    def plain(self) -> dict[str, Any]:
        """The message as chat templates take messages; newlines join the parts of the content."""
        role = "system" if self.role == "developer" else self.role
        plain: dict[str, Any] = {"role": role, "content": _joined(self.content)}
        if self.tool_calls:  # the templates write the arguments as JSON themselves
            plain["tool_calls"] = [
                {"type": "function"} | call | {"function": call["function"] | {"arguments": _object(call)}}
                for call in self.tool_calls
            ]
        return plain | ({"tool_call_id": self.tool_call_id} if self.tool_call_id else {})


def _object(call: ToolCall) -> Any:
    """The arguments of a call as an object; a text that is none stays a text."""
    text = call["function"]["arguments"]
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text
    return found if isinstance(found, dict) else text


def _limits(name: str, low: float | None = None) -> Any:
    """The engine's range of a sampling parameter; ``low``: the API's lower end in place of the engine's."""
    span = range_of(SamplingParams, name)
    if span is None:
        return Field()
    ge, gt = (span.low, span.above) if low is None else (low, None)
    return Field(ge=ge, gt=gt, le=span.high, allow_inf_nan=None if isinstance(span.low, int) else False)


_Number = Annotated[float, Field(strict=True)]
_KINDS: Mapping[type, Any] = {int: StrictInt, float: _Number, bool: StrictBool}
# Numbers and switches of the engine are fields of the API, with the engine's names, ranges and defaults.
_engine_fields: dict[str, Any] = {
    item.name: (Annotated[_KINDS[type(item.default)], _limits(item.name)], item.default)
    for item in fields(SamplingParams)
    if type(item.default) in _KINDS and item.name not in ("max_new_tokens", "seed")
}
_EngineFields: Any = create_model("_EngineFields", __base__=_Body, **_engine_fields)
_Count = Annotated[StrictInt, Field(ge=1)]  # the server cuts a larger number to the context
_TokenId = Annotated[StrictInt, _limits("stop_token_ids")]
_PromptId = Annotated[StrictInt, Field(ge=0)]
_StopText = Annotated[StrictStr, Field(min_length=1, max_length=MAX_STOP_LENGTH)]


class StructuredOutputs(_Body):
    """What an answer must look like, as vLLM writes this."""

    json_schema: dict[str, Any] | StrictStr | None = Field(default=None, alias="json")
    json_object: StrictBool = False
    regex: StrictStr | None = None
    choice: Annotated[list[_StopText], Field(max_length=1024)] = []
    grammar: StrictStr | None = None

    @property
    def structure(self) -> dict[str, Any]:
        """The engine's parameters."""
        schema = {"type": "object"} if self.json_object else self.json_schema
        return {"json_schema": schema, "regex": self.regex, "choice": self.choice, "grammar": self.grammar}


class Generation(_EngineFields):
    """The fields of both kinds of requests; here stand those that differ from the engine's."""

    model: StrictStr = ""  # the one that is served
    max_tokens: _Count | None = None  # up to the end of the context
    temperature: Annotated[_Number, _limits("temperature")] = 1.0
    top_p: Annotated[_Number, _limits("top_p", 0.0)] = 1.0
    top_k: Annotated[StrictInt, _limits("top_k", -1)] = 0
    seed: Annotated[StrictInt, _limits("seed")] | None = None
    stop: _StopText | Annotated[list[_StopText], Field(max_length=MAX_STOPS)] = []
    stop_token_ids: Annotated[list[_TokenId], Field(max_length=64)] = []
    logit_bias: Annotated[
        dict[Annotated[int, Field(ge=0)], Annotated[_Number, _limits("logit_bias")]], Field(max_length=MAX_BIASED)
    ] = {}
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    n: Annotated[StrictInt, Field(ge=1, le=MAX_CHOICES)] = 1
    stream: StrictBool = False
    stream_options: StreamOptions | None = None
    prediction: Prediction | None = None
    return_token_ids: StrictBool = Field(
        default=False, description="the answer holds the token ids of prompt and answer, as with vLLM; not for streams"
    )
    speculation: StrictBool = Field(default=True, description="false: no draft tokens; the answer is the same")
    record: StrictBool = Field(default=True, description="false: a server that records leaves this answer out")
    details: StrictBool = Field(
        default=False, description="report which tokens were drafted, and in a stream the tree of each step"
    )

    @model_validator(mode="after")
    def _check_stream_options(self) -> "Generation":
        if self.stream_options is not None and not self.stream:
            raise refusal("stream_options", "{name} is only for streams: set stream to true")
        if self.return_token_ids and self.stream:
            raise refusal("return_token_ids", "{name} is only for whole answers: leave stream out")
        if len(self._forms) > 1:
            raise refusal("structured_outputs", "{name} and response_format say the same: give one of them")
        return self

    @property
    def _forms(self) -> list[dict[str, Any]]:
        """The engine's parameters of what the answer must look like."""
        asked = self.response_format, self.structured_outputs
        return [each.structure for each in asked if each is not None and each.structure]

    @property
    def num_logprobs(self) -> int | None:
        """Number of alternatives listed with each token; None: no log-probabilities."""
        return None

    def cut(self, text: str, seconds: float) -> int | None:
        """Where the text must end although the model goes on (:mod:`drafter.serving.editors`)."""
        return None

    @property
    def predicted(self) -> str:
        """The text that the answer probably repeats."""
        return "" if self.prediction is None else _joined(self.prediction.content)

    def params(self, max_length: int) -> SamplingParams:
        """The engine's parameters, without a seed, of an answer of at most ``max_length`` tokens."""
        own = {name: getattr(self, name) for name in _engine_fields}
        own["top_k"], own["stop_token_ids"] = max(0, self.top_k), tuple(self.stop_token_ids)
        own["top_p"] = max(self.top_p, 1e-9)  # 0 keeps the likeliest token alone, like any value below its probability
        own["logit_bias"] = self.logit_bias
        own |= next(iter(self._forms), {})
        own["stop"] = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        return SamplingParams(min(self.max_tokens or max_length, max_length), **own)


class ChatRequest(Generation):
    """Body of ``POST /v1/chat/completions``."""

    messages: _Many[Message]
    max_completion_tokens: _Count | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] = []
    tool_choice: Literal["none", "auto", "required"] | Tool = "auto"
    logprobs: StrictBool = False
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=MAX_TOP_LOGPROBS)] = 0

    @model_validator(mode="after")
    def _check_logprobs_and_join_limits(self) -> "ChatRequest":
        if self.top_logprobs and not self.logprobs:
            raise refusal("top_logprobs", "{name} needs logprobs: set logprobs to true")
        self.max_tokens = self.max_completion_tokens or self.max_tokens
        if len({tool["function"]["name"] for tool in self.tools}) < len(self.tools):
            raise refusal("tools", "{name} has two functions of one name")
        if self.tool_choice not in ("none", "auto") and not self.callable_tools:
            raise refusal("tool_choice", "{name} asks for a function that is not among the tools")
        return self

    @property
    def callable_tools(self) -> list[Tool]:
        """The tools that the answer may call, as chat templates take tools."""
        if isinstance(self.tool_choice, dict):
            return [tool for tool in self.tools if tool["function"]["name"] == self.tool_choice["function"]["name"]]
        return self.tools if self.tool_choice != "none" else []

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None


class CompletionRequest(Generation):
    """Body of ``POST /v1/completions``."""

    prompt: Text | _Many[Text] | _Many[_PromptId] | _Many[_Many[_PromptId]]
    suffix: Text = ""  # the text is what stands between prompt and suffix
    max_tokens: _Count = 16  # as in the API
    logprobs: Annotated[StrictInt, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts as a list."""
        is_one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if is_one else self.prompt  # type: ignore[list-item, return-value]


def error_of(errors: list[Any]) -> ApiError:
    """The API's error for one of pydantic's errors about a body.

    A value that fits no type of a union has an error for each of the types: the deepest one says most, and a value out
    of range says more than a type that was never meant.
    """
    first = max(errors, key=lambda error: (not error["type"].endswith("_type"), len(error["loc"])))
    context = first.get("ctx") or {}
    # A place is ("messages", 0, "content", "list[TextPart]"); names of types are left out.
    path = ""
    for part in first["loc"]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "int", "Tool"):
            path += f".{part}" if path else part
    name = context.get("name")
    param = ".".join(filter(None, (path, name))) or None
    message = first["msg"] if name or not param else f"{param}: {first['msg']}"
    code = "unsupported_parameter" if first["type"] == "unsupported_parameter" else None
    return ApiError(400, message, param=param, code=code)


Body = TypeVar("Body", bound=BaseModel)


def parsed(raw: bytes, kind: type[Body], most_values: int) -> Body:
    """The body of a request (ApiError: it is no JSON, holds more values than ``most_values``, or has a wrong field)."""
    bare = raw
    if _num_values(bare) > most_values:  # perhaps of a text: only what stands outside of texts counts
        bare = b"".join(raw.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2])
    if _num_values(bare) > most_values:
        raise ApiError(400, f"the body holds more than {most_values} values: send less at once", code="body_too_large")
    try:
        return kind.model_validate(json.loads(raw))
    except ValidationError as error:
        raise error_of(list(error.errors())) from None
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {first_line(error)}", code="invalid_json") from None


def _num_values(raw: bytes) -> int:
    return raw.count(b",") + raw.count(b"[") + raw.count(b"{")
