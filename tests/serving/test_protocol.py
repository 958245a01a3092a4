"""Requests and errors by themselves."""

from typing import Any

import pytest
from pydantic import ValidationError

from drafter.decoding.params import SamplingParams
from drafter.serving.protocol import REFUSED, ApiError, ChatRequest, CompletionRequest, error_of
from drafter.utils.validate import range_of

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
TEXT: dict[str, Any] = {"model": "m", "prompt": "x"}


def refusal(kind: type[ChatRequest] | type[CompletionRequest], body: Any) -> ApiError:
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    return error_of(list(caught.value.errors()))


@pytest.mark.parametrize("name", REFUSED)
def test_every_refused_field_is_named(name: str) -> None:
    for kind, body in ((ChatRequest, CHAT), (CompletionRequest, TEXT)):
        error = refusal(kind, body | {name: {"asks": "for something"}})
        assert (error.param, error.code, error.status) == (name, "unsupported_parameter", 400)
        assert name in error.message


@pytest.mark.parametrize("name", REFUSED)
def test_neutral_values_pass(name: str) -> None:
    for value in (None, *REFUSED[name]):
        ChatRequest.model_validate(CHAT | {name: value})


def test_booleans_are_no_numbers() -> None:
    assert refusal(CompletionRequest, TEXT | {"presence_penalty": False}).param == "presence_penalty"
    assert refusal(CompletionRequest, TEXT | {"echo": 0}).param == "echo"
    assert refusal(CompletionRequest, TEXT | {"temperature": True}).param == "temperature"
    assert refusal(CompletionRequest, TEXT | {"max_tokens": True}).param == "max_tokens"
    assert refusal(CompletionRequest, TEXT | {"prompt": [True]}).param == "prompt"


def test_best_of_n_asks_for_nothing() -> None:
    assert CompletionRequest.model_validate(TEXT | {"best_of": 3, "n": 3}).n == 3
    assert refusal(CompletionRequest, TEXT | {"best_of": 3, "n": 2}).param == "best_of"


@pytest.mark.parametrize("prompt", [[], [[]], {}, 5, None, [1, "x"], [[1], "x"], [-1], [1.5], [["x"]], [[[1]]]])
def test_bad_prompts(prompt: object) -> None:
    if prompt == [[]]:  # an empty list of ids is refused by the engine, like an empty text
        assert CompletionRequest.model_validate(TEXT | {"prompt": prompt}).prompts == [[]]
    else:
        assert refusal(CompletionRequest, TEXT | {"prompt": prompt}).param == "prompt"


@pytest.mark.parametrize(
    ("prompt", "wanted"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_prompts_come_one_by_one(prompt: object, wanted: list[object]) -> None:
    assert CompletionRequest.model_validate(TEXT | {"prompt": prompt}).prompts == wanted


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 1e308, -0.1, "0.5", []])
def test_bad_temperatures(number: object) -> None:
    assert refusal(ChatRequest, CHAT | {"temperature": number}).param == "temperature"


@pytest.mark.parametrize("name", ["temperature", "top_p", "top_k", "min_p", "seed", "stop_token_ids"])
def test_no_number_passes_that_the_engine_refuses(name: str) -> None:
    span = range_of(SamplingParams, name)
    assert span is not None
    is_list = name == "stop_token_ids"
    ChatRequest.model_validate(CHAT | {name: [span.high] if is_list else span.high})
    SamplingParams(**{name: (span.high,) if is_list else span.high})  # type: ignore[arg-type]
    for value in (span.high + 1, span.high * 10**30, -(span.high**2) - 10):
        error = refusal(ChatRequest, CHAT | {name: [value] if is_list else value})
        assert error.param == (f"{name}[0]" if is_list else name)


@pytest.mark.parametrize("body", [None, [], "x", 5, {}])
def test_bodies_that_are_no_requests(body: object) -> None:
    assert refusal(ChatRequest, body).status == 400


@pytest.mark.parametrize(
    ("kind", "fields", "param"),
    [
        (ChatRequest, {"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content"),
        (ChatRequest, {"messages": [{"role": "user", "content": "\U0001f600"}]}, None),
        (ChatRequest, {"messages": [{"role": "user", "content": [{"type": "text", "text": "\ud83d"}]}]}, "messages[0]"),
        (CompletionRequest, {"prompt": "a\udfff"}, "prompt"),
        (CompletionRequest, {"prompt": ["a", "\ud83d"]}, "prompt"),
        (CompletionRequest, {"stop": "\ud83d"}, "stop"),
        (CompletionRequest, {"stop": ["a", "\ud83d"]}, "stop"),
    ],
)
def test_half_a_surrogate_pair_is_no_text(kind: Any, fields: dict[str, Any], param: str | None) -> None:
    body = (CHAT if kind is ChatRequest else TEXT) | fields
    if param is None:
        kind.model_validate(body)
    else:
        error = refusal(kind, body)
        assert error.param is not None and error.param.startswith(param)
        assert "surrogate" in error.message


def test_error_bodies() -> None:
    error = ApiError(429, "full", kind="rate_limit_error", code="queue_full", retry_after=7)
    assert error.body == {"error": {"message": "full", "type": "rate_limit_error", "param": None, "code": "queue_full"}}
    assert error.headers == {"Retry-After": "7"}
    ApiError(400, "\ud800", param="\udfff").body["error"]["message"].encode()


def test_the_deepest_place_is_reported_in_the_api_s_way() -> None:
    messages = [CHAT["messages"][0], {"role": "user", "content": [{"type": "text", "text": 5}]}]
    assert refusal(ChatRequest, CHAT | {"messages": messages}).param == "messages[1].content"
    assert refusal(ChatRequest, CHAT | {"stream_options": {"include_usage": 3}}).param == "stream_options.include_usage"
    content = [{"type": "image_url"}]
    assert "{" not in refusal(ChatRequest, CHAT | {"messages": [{"role": "user", "content": content}]}).message
    assert refusal(ChatRequest, CHAT | {"stop_token_ids": [1, "x"]}).param == "stop_token_ids[1]"
