"""Requests and errors by themselves."""

from dataclasses import fields
from typing import Any

import pytest
from pydantic import ValidationError

from drafter.decoding.params import SamplingParams
from drafter.serving.protocol import ApiError, ChatRequest, CompletionRequest, error_of
from drafter.utils.validate import range_of

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
TEXT: dict[str, Any] = {"model": "m", "prompt": "x"}
HALF = "\ud83d"  # of a surrogate pair


def refusal(kind: type[ChatRequest] | type[CompletionRequest], body: Any) -> ApiError:
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    errors = caught.value.errors()
    assert len(errors) < 10, "however long the list"
    return error_of(list(errors))


@pytest.mark.parametrize("kind, body", [(ChatRequest, CHAT), (CompletionRequest, TEXT)])
def test_fields_that_nobody_knows_are_named_unless_they_ask_for_nothing(kind: Any, body: dict[str, Any]) -> None:
    asked: list[tuple[str, Any]] = [
        ("functions", [{}]), ("min_tokens", 1), ("echo", True),
        ("add_special_tokens", 0), ("skip_special_tokens", False), ("new", "x"), ("new", 0),
    ]  # fmt: skip
    for name, value in asked:
        error = refusal(kind, body | {name: value})
        assert (error.param, error.code, error.status_code) == (name, "unsupported_parameter", 400)
        assert name in error.detail and not set("{}") & set(error.detail), "a filled template"
    neutral = {"tools": [], "logit_bias": {}, "echo": False, "presence_penalty": 0.0, "repetition_penalty": 1.0}
    neutral |= {"user": "me", "metadata": {"a": 1}, "best_of": 1, "tool_choice": "auto", "add_special_tokens": True}
    kind.model_validate(body | neutral | {"response_format": {"type": "text"}, "new": None})
    for nothing in (None, [], "x", {}):
        assert refusal(kind, nothing).status_code == 400
    error = refusal(kind, body | {HALF + "x" * 500: 1})
    assert error.body["error"]["param"].endswith("x ...") and len(error.detail) < 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        *(({"prompt": value}, "prompt") for value in ([], {}, 5, None)),
        *(({"prompt": value}, "prompt[0]") for value in ([[]], [1, "x"], [[1], "x"], [-1], [1.5], [True])),
        *(({"prompt": value}, "prompt[0][0]") for value in ([["x"]], [[[1]]])),
        ({"prompt": [None] * 100_000}, "prompt[0]"),
        ({"prompt": "a\udfff"}, "prompt"),
        ({"prompt": ["a", HALF]}, "prompt[1]"),
        ({"stop": HALF}, "stop"),
        ({"stop": ["a", HALF]}, "stop[1]"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": ["x" * 257]}, "stop[0]"),
        ({"stop_token_ids": [1, "x"]}, "stop_token_ids[1]"),
        *(({"temperature": value}, "temperature") for value in (float("nan"), 1e308, -0.1, "0.5", [], True)),
        ({"max_tokens": True}, "max_tokens"),
        ({"best_of": 3, "n": 2}, "best_of"),
        ({"stream_options": {"include_usage": 3}}, "stream_options.include_usage"),
        ({"return_token_ids": True, "stream": True}, "return_token_ids"),
        ({"prediction": {"type": "content", "content": "a", "new": 1}}, "prediction.new"),
        *(({"response_format": {"type": kind} | more}, f"response_format.{place}") for kind, more, place in (
            ("json_object", {"schema": {"type": "array"}}, "schema"), ("x", {}, "type"),
            ("text", {"json_schema": {"schema": {}}}, "json_schema"),
            ("json_schema", {"json_schema": {"schema": 3}}, "json_schema.schema"),
            ("json_schema", {"json_schema": {"schema": {}, "new": 1}}, "json_schema.new"))),
        *(({"messages": [CHAT["messages"][0], {"role": "user", "content": content}]}, f"messages[1].content{place}")
          for content, place in ((HALF, ""), ([{"type": "text", "text": HALF}], "[0].text"), (7, ""),
                                 ([{"type": "image_url"}], "[0].type"))),
    ],
)  # fmt: skip
def test_wrong_fields_are_named(fields: dict[str, Any], param: str) -> None:
    is_chat = "messages" in fields
    error = refusal(ChatRequest if is_chat else CompletionRequest, (CHAT if is_chat else TEXT) | fields)
    assert error.param == param and error.status_code == 400 and not set("{}") & set(error.detail)


def test_bodies_that_pass() -> None:
    for prompt, wanted in (("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])):
        assert CompletionRequest.model_validate(TEXT | {"prompt": prompt}).prompts == wanted
    optional = {name for name, field in CompletionRequest.model_fields.items() if not field.is_required()} - {"model"}
    assert CompletionRequest.model_validate(TEXT | dict.fromkeys(optional)) == CompletionRequest.model_validate(TEXT)
    parts = [{"type": "text", "text": "Name a"}, {"type": "text", "text": "colour."}]
    turns = {"system": "\U0001f600", "developer": "Be brief.", "user": parts, "assistant": "Red."}
    messages = [{"role": role, "content": content} for role, content in turns.items()]
    plain = [turn.plain for turn in ChatRequest.model_validate(CHAT | {"messages": messages}).messages]
    assert [turn["role"] for turn in plain] == ["system", "system", "user", "assistant"]
    assert [turn["content"] for turn in plain] == ["\U0001f600", "Be brief.", "Name a\ncolour.", "Red."]


def test_tools_and_their_calls() -> None:
    tools = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in "fg"]
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}
    turns = [CHAT["messages"][0], {"role": "assistant", "content": None, "tool_calls": [call]},
             {"role": "tool", "tool_call_id": "c1", "content": "7"}]  # fmt: skip
    body = CHAT | {"messages": turns, "tools": tools}
    request = ChatRequest.model_validate(body)
    function = {"name": "f", "arguments": {"a": [1]}}
    assert request.messages[1].plain["tool_calls"] == [call | {"function": function}], "templates write the JSON"
    assert request.messages[2].plain == {"role": "tool", "content": "7", "tool_call_id": "c1"}
    assert request.callable_tools == tools
    one = {"type": "function", "function": {"name": "g"}}
    assert ChatRequest.model_validate(body | {"tool_choice": one}).callable_tools == tools[1:]
    assert ChatRequest.model_validate(body | {"tool_choice": "none"}).callable_tools == []
    other = {"type": "function", "function": {"name": "h"}}
    for changes, param in (
        ({"tools": tools * 250}, "tools"), ({"tools": tools[:1] * 2}, "tools"), ({"tool_choice": other}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {}}}, "tool_choice.function.name"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [turns[1] | {"role": "user"}]}, "messages[0].tool_calls"),
    ):  # fmt: skip
        assert refusal(ChatRequest, body | changes).param == param


RANGED = [item.name for item in fields(SamplingParams) if range_of(SamplingParams, item.name) is not None]


@pytest.mark.parametrize("name", [name for name in RANGED if name != "max_new_tokens"])
def test_no_number_passes_that_the_engine_refuses(name: str) -> None:
    span = range_of(SamplingParams, name)
    assert span is not None

    def given(value: float) -> dict[str, Any]:
        return {name: [value] if name == "stop_token_ids" else {5: value} if name == "logit_bias" else value}

    ChatRequest.model_validate(CHAT | given(span.high))
    SamplingParams(**given(span.high))
    for value in (span.high + 1, span.high * 10**30, -(span.high**2) - 10):
        error = refusal(ChatRequest, CHAT | given(value))
        assert error.param == name + {"stop_token_ids": "[0]", "logit_bias": "[5]"}.get(name, "")
