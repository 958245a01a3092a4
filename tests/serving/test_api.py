"""The official openai client against a live server."""

import json
import math
from typing import Any

import openai
import pytest
import torch

from tests.data.tiny import END
from tests.serving.live import MODEL, Live, offline
from tests.serving.tiny import tiny_target

MESSAGES = [{"role": "user", "content": "Name a colour."}]


def chat(live: Live, extra: dict[str, Any] | None = None, **fields: Any) -> Any:
    """A greedy answer of 24 tokens, unless the fields say otherwise; ``extra`` goes into the body as well."""
    body = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 24} | fields
    return live.client.chat.completions.create(**body, extra_body=extra)


def complete(live: Live, prompt: Any, extra: dict[str, Any] | None = None, **fields: Any) -> Any:
    body = {"model": MODEL, "prompt": prompt, "temperature": 0} | fields
    return live.client.completions.create(**body, extra_body=extra)


def test_chat_is_the_targets_own_answer_whole_and_streamed(idle: Live) -> None:
    answer, wanted = chat(idle), offline(MESSAGES)
    choice, usage = answer.choices[0], answer.usage
    assert (choice.message.content, choice.message.role) == (wanted.text, "assistant")
    assert choice.finish_reason == wanted.finish_reason == "length"
    assert answer.model == MODEL and answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")
    assert usage.prompt_tokens == len(wanted.prompt_ids) and usage.completion_tokens == len(wanted.token_ids) == 24
    assert usage.total_tokens == usage.prompt_tokens + 24
    *chunks, last = chat(idle, stream=True, stream_options={"include_usage": True})
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == wanted.text
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert len({chunk.id for chunk in chunks}) == 1 and all(chunk.usage is None for chunk in chunks)
    assert last.choices == [] and last.usage.total_tokens == usage.total_tokens
    assert all(chunk.usage is None and chunk.choices for chunk in chat(idle, stream=True)), "unless asked"


def test_the_engines_thread_makes_no_text_and_a_failing_decoder_ends_its_answer_alone(idle: Live, monkeypatch) -> None:
    def refuse(*_: Any, **__: Any) -> str:
        raise RuntimeError("no text")

    monkeypatch.setattr(idle.server.worker.engine.target, "decode", refuse)
    wanted = chat(idle).choices[0].message.content
    with monkeypatch.context() as within:
        within.setattr(idle.server.model, "text_of", refuse)
        with pytest.raises(openai.InternalServerError, match="an internal error"):
            chat(idle)
    assert chat(idle).choices[0].message.content == wanted


def test_several_prompts_and_choices_in_order(idle: Live) -> None:
    prompts = ["one two", "three four", "five six"]
    fields = {"max_tokens": 10, "temperature": 0.9, "seed": 5, "n": 2}
    answer = complete(idle, prompts, **fields)
    assert answer.object == "text_completion" and answer.id.startswith("cmpl-")
    assert [choice.index for choice in answer.choices] == list(range(6))
    for place, prompt in enumerate(prompts):
        assert answer.choices[2 * place].text == offline(prompt, max_new_tokens=10, temperature=0.9, seed=5).text
        assert answer.choices[2 * place].text != answer.choices[2 * place + 1].text
    ids = [tiny_target().encode(prompt) for prompt in prompts]
    assert answer.usage.prompt_tokens == sum(map(len, ids))
    texts = [""] * 6
    for chunk in complete(idle, ids, **fields, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in answer.choices], "also of token ids"


def test_token_limits(idle: Live) -> None:
    endless = {"ignore_eos": True}
    assert complete(idle, "a", endless).usage.completion_tokens == 16
    assert chat(idle, endless, max_tokens=openai.omit).usage.total_tokens == 256, "up to the end of the row"
    assert chat(idle, endless, max_completion_tokens=3).usage.completion_tokens == 3


def test_seeds_and_sampling_parameters(idle: Live) -> None:
    def text(**fields: Any) -> str:
        return str(chat(idle, {"temperature": 1.0, "ignore_eos": True} | fields).choices[0].message.content)

    many = {"temperature": 1.3, "seed": 3, "top_p": 0.8, "top_k": 20, "min_p": 0.02}
    once = {"temperature": 1.0, "seed": 11}
    ruled = {"presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2, "temperature": 0.0}
    # Extreme values mean greedy.
    for fields, params in (
        ({"top_p": 0}, {}), ({"temperature": 1e-30}, {}), (many, many), (once, once),
        (ruled | {"logit_bias": {"101": 5}}, ruled | {"logit_bias": {101: 5}}),
    ):  # fmt: skip
        assert text(**fields) == offline(MESSAGES, ignore_eos=True, **params).text
    assert len({text(), text(), text(seed=11), text(seed=2**64 - 1)}) == 4, "without a seed each is drawn anew"


def test_stop_strings_and_stop_tokens_end_with_reason_stop(idle: Live) -> None:
    wanted = offline("Once upon", max_new_tokens=40, ignore_eos=True)
    stop, token = wanted.text[12:15], wanted.token_ids[7]
    cut = wanted.text[: wanted.text.index(stop)]
    fields: dict[str, Any] = {"max_tokens": 40, "stop": ["\0never", stop]}
    chunks = list(complete(idle, "Once upon", {"ignore_eos": True}, **fields, stream=True))
    choice = complete(idle, "Once upon", {"ignore_eos": True}, **fields).choices[0]
    assert "".join(chunk.choices[0].text for chunk in chunks) == choice.text == cut
    assert choice.finish_reason == chunks[-1].choices[0].finish_reason == "stop"
    answer = complete(idle, "Once upon", {"stop_token_ids": [token], "ignore_eos": True}, max_tokens=40)
    assert answer.choices[0].finish_reason == "stop" and wanted.text.startswith(answer.choices[0].text)
    assert answer.usage.completion_tokens == wanted.token_ids.index(token) + 1, "the stop token counts"


def test_logprobs(idle: Live) -> None:
    sampling = {"temperature": 0.7, "seed": 4}
    fields = {**sampling, "logprobs": True, "top_logprobs": 2}
    choice = chat(idle, {"ignore_eos": True}, **fields).choices[0]
    _, *chunks = chat(idle, {"ignore_eos": True}, **fields, stream=True)
    streamed = [item for chunk in chunks for item in chunk.choices[0].logprobs.content]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    wanted = offline(MESSAGES, ignore_eos=True, **sampling)
    assert choice.message.content == text and len(wanted.token_ids) == 24
    with torch.no_grad():
        logits_TV = tiny_target().model(torch.tensor([[*wanted.prompt_ids, *wanted.token_ids]])).logits[0]
    logprob_TV = logits_TV.log_softmax(-1)[len(wanted.prompt_ids) - 1 :]
    for content in (choice.logprobs.content, streamed):
        joined = b"".join(bytes(item.bytes) for item in content).decode(errors="replace")
        assert joined.replace(END, "") == text, "also where a character has several tokens"
        for place, (token, item) in enumerate(zip(wanted.token_ids, content, strict=True)):
            assert math.isclose(item.logprob, logprob_TV[place, token].item(), abs_tol=1e-4)
            likeliest = logprob_TV[place].topk(2)
            assert [top.logprob for top in item.top_logprobs] == pytest.approx(likeliest.values.tolist(), abs=1e-4)
    older = complete(idle, wanted.prompt_ids, {"ignore_eos": True}, **sampling, max_tokens=24, logprobs=2)
    lists = older.choices[0].logprobs
    assert lists.tokens == [item.token for item in streamed]
    assert lists.token_logprobs == pytest.approx([item.logprob for item in streamed], abs=1e-4)
    best = [item.top_logprobs[0].logprob for item in streamed]
    assert [max(top.values()) for top in lists.top_logprobs] == pytest.approx(best, abs=1e-4)
    assert lists.text_offset[0] == 0 and lists.text_offset == sorted(lists.text_offset)


def test_details_tell_where_tokens_came_from(idle: Live) -> None:
    extra = {"details": True, "ignore_eos": True}
    choice = chat(idle, extra).choices[0]
    details = choice.details
    assert "".join(text for text, _ in details["tokens"]) == choice.message.content
    num_own = sum(not is_drafted for _, is_drafted in details["tokens"])
    assert details["num_tokens"] == 24 and num_own <= details["num_target_forwards"] < 24
    _, *chunks = chat(idle, extra, stream=True)
    assert [piece for chunk in chunks for piece in chunk.choices[0].details["tokens"]] == details["tokens"]
    tree = chunks[-1].choices[0].details["tree"]
    assert len(tree["tokens"]) == len(tree["parents"]) == 96 and tree["path"][0] == 0
    before = idle.metric("accepted_draft_tokens_total")
    plain = chat(idle, extra | {"speculation": False}).choices[0]
    assert plain.message.content == choice.message.content
    assert not any(is_drafted for _, is_drafted in plain.details["tokens"])
    assert plain.details["num_target_forwards"] == plain.details["num_tokens"]
    assert idle.metric("accepted_draft_tokens_total") == before


def test_repeated_prompt_counts_cached_tokens(idle: Live) -> None:
    messages = [{"role": "user", "content": "A question that no other test asks, long enough to share."}]
    first, second = (chat(idle, messages=messages).usage for _ in range(2))
    cached = second.prompt_tokens_details.cached_tokens
    assert cached == second.prompt_tokens - 2 > first.prompt_tokens_details.cached_tokens


def test_what_the_client_makes_of_refusals(idle: Live) -> None:
    assert [model.id for model in idle.client.models.list()] == [MODEL]
    refused: list[tuple[dict[str, Any], str]] = [
        ({"prompt": "word " * 200}, "'context_length_exceeded'"),
        ({"prompt": "word " * 200, "stream": True}, "'context_length_exceeded'"),
        ({"prompt": "ab " * 500_000}, "'context_length_exceeded'"),  # which nobody tokenizes
        ({"prompt": [1, 10**30]}, "not in the vocabulary"),
        ({"prompt": ""}, "empty"),
        ({"prompt": "x", "n": 100}, "'param': 'n'"),
        ({"prompt": "x", "model": "gpt-4"}, "'param': 'model'"),
    ]
    for fields, words in refused:
        with pytest.raises((openai.BadRequestError, openai.NotFoundError)) as found:
            complete(idle, **fields)
        assert words in str(found.value.body)
        assert (found.value.status_code == 404) == ("model" in fields)


def test_answers_look_as_they_must(idle: Live) -> None:
    schema = {
        "type": "object",
        "properties": {"on": {"type": "boolean"}},
        "required": ["on"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "switch", "schema": schema, "strict": True}}
    texts = [chat(idle, response_format=form).choices[0].message.content]
    texts += [
        complete(idle, "x", {"structured_outputs": {"json": wanted}}, max_tokens=24).choices[0].text
        for wanted in (schema, json.dumps(schema))
    ]
    assert {json.loads(text).keys() == {"on"} for text in texts} == {True}
    assert chat(idle, response_format={"type": "json_object"}).choices[0].message.content.startswith("{")
    choices = {"structured_outputs": {"choice": ["red", "blue"]}}
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chat(idle, choices, stream=True))
    assert streamed == chat(idle, choices).choices[0].message.content and streamed in ("red", "blue")
    wrong = (
        ({"response_format": {"type": "json_schema"}}, "json_schema"),
        ({"structured_outputs": {"regex": "("}}, "regex"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structural_tag"),
        ({"structured_outputs": {"json_object": True}, "response_format": {"type": "json_object"}}, "give one"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "give one"),
    )
    for extra, name in wrong:
        with pytest.raises(openai.BadRequestError, match=name):
            chat(idle, extra)
