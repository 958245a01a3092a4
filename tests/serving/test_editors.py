"""Filling in the middle: the prompt built by hand, editors' own requests, ends, and models without such tokens."""

from collections.abc import Iterator
from typing import Any

import pytest
from tokenizers import AddedToken

from drafter.serving.editors import InfillRequest
from drafter.targets.infill import TOKEN_IDS, InfillTokens
from tests.data.tiny import tiny_tokenizer
from tests.engine.test_requests import encode as ids
from tests.serving.live import Live, live_server, offline
from tests.serving.tiny import tiny_engine

QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>", "<|fim_pad|>")
FIELDS = [
    "content", "timings/prompt_n", "timings/prompt_ms", "timings/prompt_per_token_ms", "timings/prompt_per_second",
    "timings/predicted_n", "timings/predicted_ms", "timings/predicted_per_token_ms", "timings/predicted_per_second",
    "truncated", "tokens_cached",
]  # fmt: skip


def tokenizer_with(names: tuple[str, ...]) -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken(name, special=True) for name in names]})
    return tokenizer


@pytest.fixture(scope="module")
def coder() -> Iterator[Live]:
    """A server whose vocabulary names six of the tiny model's own tokens as a coder's; the prompt stays short."""
    tokens = InfillTokens(prefix=40, suffix=41, middle=42, repository=43, file=44, ends=(44, 43, 45))
    with live_server(tiny_engine(max_num_seqs=2)) as server:
        server.server.encoder.infill = tokens
        yield server


def by_hand(prompt: list[int], **params: Any) -> Any:
    return offline(prompt, stop_token_ids=(44, 43, 45), **params)


def test_tokens_are_found_by_the_files_keys_or_by_known_names() -> None:
    assert InfillTokens.of(tiny_tokenizer()) is None
    tokenizer = tokenizer_with(QWEN)
    number = tokenizer.convert_tokens_to_ids
    found = InfillTokens.of(tokenizer)
    assert found is not None and found[:5] == tuple(map(number, QWEN[:5])) and number("<|fim_pad|>") in found.ends
    assert found.around("a", "b") == (found.prefix, "a", found.suffix, "b", found.middle)
    tokenizer.init_kwargs[TOKEN_IDS] = {"prefix": 9}
    assert InfillTokens.of(tokenizer) == found._replace(prefix=9, ends=(*found.ends[:5], 9, *found.ends[6:]))
    codestral = InfillTokens.of(tokenizer_with(("[PREFIX]", "[SUFFIX]")))
    assert codestral is not None
    assert codestral.around("a", "b") == (codestral.suffix, "b", codestral.prefix, "a"), "the suffix stands first"
    assert codestral.context([("x.py", "y")])[1] == ("\n\n--- x.py ---\n\ny",)


def test_a_suffix_is_the_prompt_built_by_hand(coder: Live) -> None:
    wanted = by_hand([40, *ids("def f(a):"), 41, *ids("\nprint(f(1))"), 42], max_new_tokens=40)
    body = {"prompt": "def f(a):", "suffix": "\nprint(f(1))", "max_tokens": 40, "temperature": 0}
    answer = coder.client.completions.create(model="tiny", **body)
    assert answer.choices[0].text == wanted.text and answer.choices[0].finish_reason == wanted.finish_reason
    assert answer.usage.completion_tokens == len(wanted.token_ids)
    with coder.http() as http:
        for fields, param in (({"prompt": [1, 2]}, "suffix"), ({"suffix": "x" * 9000}, "prompt")):
            error = http.post("/v1/completions", json=body | fields).json()["error"]
            assert error["param"] == param


def test_the_requests_of_llama_vim(coder: Live) -> None:
    """A chunk that is kept warm, a first request that is quick, and the next keystroke's."""
    chunk = {"text": "def g(): pass\n", "time": [1, 2], "filename": "g.py"}
    common: dict[str, Any] = {"id_slot": 0, "input_extra": [chunk], "stream": False, "cache_prompt": True, "model": ""}
    warm = common | {
        "input_prefix": "", "input_suffix": "", "prompt": "", "n_predict": 0, "temperature": 0.0, "samplers": [],
        "t_max_prompt_ms": 1, "t_max_predict_ms": 1, "response_fields": [""],
    }  # fmt: skip
    asked = common | {
        "input_prefix": "import g\n", "input_suffix": "\nend\n", "prompt": "x = g.", "n_predict": 24, "stop": [],
        "n_indent": 0, "top_k": 40, "top_p": 0.90, "samplers": ["top_k", "top_p", "infill"], "t_max_prompt_ms": 500,
        "t_max_predict_ms": 60_000, "response_fields": FIELDS,
    }  # fmt: skip
    context = [43, *ids("repository\n"), 44, *ids("g.py\ndef g(): pass\n"), 44, *ids("current\n")]
    wanted = by_hand([*context, 40, *ids("import g\nx = g."), 41, *ids("\nend\n"), 42])
    with coder.http() as http:
        assert http.post("/infill", json=warm).json() == {}
        found = http.post("/infill", json=asked).json()
        assert list(found) == FIELDS and found["content"] == wanted.text
        assert found["tokens_cached"] >= len(context) - 2 and found["timings/predicted_n"] == len(wanted.token_ids)
        pieces = http.post("/infill", json=asked | {"stream": True, "response_fields": []}).text
        assert "[DONE]" not in pieces and '"stop":true' in pieces and '"stop_type"' in pieces
        several = http.post("/infill", json=asked | {"n_cmpl": 3, "response_fields": []}).json()
        assert [each["content"] for each in several] == [wanted.text] * 3, "greedy texts are one text"
        large = asked | {"input_extra": [chunk | {"text": "y = 1\n" * 500}, chunk]}
        assert http.post("/infill", json=large).json()["content"] == wanted.text, "the first chunks go"
        assert http.post("/infill", json=asked | {"input_suffix": "z" * 9000}).status_code == 400
        assert http.post("/infill", json=asked | {"samplers": ["dry"]}).json()["error"]["param"] == "samplers"
        assert http.post("/infill", json=asked | {"n_predict": 1}).json()["timings/predicted_n"] == 1
    coder.wait_until_idle()


def test_a_model_without_such_tokens_says_so(live: Live) -> None:
    with live.http() as http:
        answer = http.post("/infill", json={"input_prefix": "a", "input_suffix": "b"})
        assert answer.status_code == 501 and "filling in the middle" in answer.json()["error"]["message"]
        answer = http.post("/v1/completions", json={"prompt": "a", "suffix": "b"})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "suffix"


@pytest.mark.parametrize(
    ("fields", "text", "seconds", "wanted"),
    [
        ({"n_indent": 4}, "a\n    b\n\n  c", 0.0, "a\n    b\n"),
        ({"n_indent": 4}, "a\n    b\n  ", 0.0, None),
        ({"t_max_predict_ms": 100}, "a\nb", 0.2, "a\nb"),
        ({"t_max_predict_ms": 100}, "a", 0.2, None),
        ({"t_max_predict_ms": 100}, "a\nb", 0.05, None),
    ],
)
def test_ends_by_indentation_and_by_time(fields: dict[str, int], text: str, seconds: float, wanted: str | None) -> None:
    place = InfillRequest.model_validate(fields).cut(text, seconds)
    assert (None if place is None else text[:place]) == wanted
