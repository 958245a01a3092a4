"""The official openai client against a live server."""

import math
from typing import Any

import openai
import pytest
import torch

from tests.data.tiny import END
from tests.serving.live import MODEL, Live, offline
from tests.serving.tiny import tiny_target

MESSAGES = [{"role": "user", "content": "Name a colour."}]
GREEDY = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 24}


def test_chat_is_the_targets_own_answer(idle: Live) -> None:
    answer = idle.client.chat.completions.create(**GREEDY)
    wanted = offline(MESSAGES)
    choice = answer.choices[0]
    assert choice.message.content == wanted.text
    assert choice.message.role == "assistant"
    assert choice.finish_reason == wanted.finish_reason
    assert answer.model == MODEL and answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(wanted.prompt_ids)
    assert answer.usage.completion_tokens == len(wanted.token_ids) == 24
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_chat_streams_the_same(idle: Live) -> None:
    create = idle.client.chat.completions.create
    *chunks, last = create(**GREEDY, stream=True, stream_options={"include_usage": True})
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == offline(MESSAGES).text
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert len({chunk.id for chunk in chunks}) == 1 and all(chunk.usage is None for chunk in chunks)
    assert last.choices == [] and last.usage.completion_tokens == 24
    assert all(chunk.usage is None and chunk.choices for chunk in create(**GREEDY, stream=True)), "unless asked"


def test_completions(idle: Live) -> None:
    text, create = "Once upon a time", idle.client.completions.create
    wanted = offline(text, max_new_tokens=20)
    for prompt in (text, tiny_target().encode(text)):
        answer = create(model=MODEL, prompt=prompt, temperature=0, max_tokens=20)
        assert answer.choices[0].text == wanted.text
        assert answer.object == "text_completion" and answer.id.startswith("cmpl-")


def test_several_prompts_and_choices_in_order(idle: Live) -> None:
    prompts = ["one two", "three four", "five six"]
    fields = {"model": MODEL, "prompt": prompts, "max_tokens": 10, "temperature": 0.9, "seed": 5, "n": 2}
    answer = idle.client.completions.create(**fields)
    assert [choice.index for choice in answer.choices] == list(range(6))
    for place, prompt in enumerate(prompts):
        assert answer.choices[2 * place].text == offline(prompt, max_new_tokens=10, temperature=0.9, seed=5).text
        assert answer.choices[2 * place].text != answer.choices[2 * place + 1].text
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(len(tiny_target().encode(prompt)) for prompt in prompts)
    texts = [""] * 6
    for chunk in idle.client.completions.create(**fields, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in answer.choices]


def test_token_limit_defaults(idle: Live) -> None:
    client = idle.client
    completion = client.completions.create(model=MODEL, prompt="a", extra_body={"ignore_eos": True})
    assert completion.usage is not None and completion.usage.completion_tokens == 16
    chat = client.chat.completions.create(model=MODEL, messages=MESSAGES, extra_body={"ignore_eos": True})
    assert chat.usage is not None and chat.usage.total_tokens == 256, "up to the end of the row"
    fields = GREEDY | {"max_completion_tokens": 3}
    assert client.chat.completions.create(**fields).usage.completion_tokens == 3  # type: ignore[union-attr]


def test_seeds(idle: Live) -> None:
    client = idle.client
    fields = GREEDY | {"temperature": 1.0, "max_tokens": 16}
    first, second = (client.chat.completions.create(**fields, seed=11).choices[0].message.content for _ in range(2))
    wanted = offline(MESSAGES, temperature=1.0, seed=11, max_new_tokens=16)
    assert first == second == wanted.text
    assert client.chat.completions.create(**fields, seed=2**64 - 1).choices[0].message.content != first
    unseeded = {client.chat.completions.create(**fields).choices[0].message.content for _ in range(3)}
    assert len(unseeded) == 3, "without a seed each answer is drawn anew"


def test_sampling_parameters_reach_the_engine(idle: Live) -> None:
    """Extreme values mean greedy."""
    seeded = {"temperature": 1.3, "seed": 3, "top_p": 0.8, "top_k": 20, "min_p": 0.02}
    for fields, params in (({"top_p": 0}, {}), ({"temperature": 1e-30}, {}), (seeded, seeded)):
        body = GREEDY | {"temperature": 1.0, "extra_body": {"ignore_eos": True} | fields}
        answer = idle.client.chat.completions.create(**body)
        assert answer.choices[0].message.content == offline(MESSAGES, ignore_eos=True, **params).text


def test_text_parts_and_developer_role(idle: Live) -> None:
    client = idle.client
    parts = [{"type": "text", "text": "Name a"}, {"type": "text", "text": "colour."}]
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    answer = client.chat.completions.create(**(GREEDY | {"messages": messages}))
    plain = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name a\ncolour."}]
    assert answer.choices[0].message.content == offline(plain).text


def test_stop_strings_and_stop_tokens_end_with_reason_stop(idle: Live) -> None:
    wanted = offline("Once upon", max_new_tokens=40, ignore_eos=True)
    stop, token = wanted.text[12:15], wanted.token_ids[7]
    cut = wanted.text[: wanted.text.index(stop)]
    fields = {"model": MODEL, "prompt": "Once upon", "max_tokens": 40, "temperature": 0}
    stopping = fields | {"stop": ["\0never", stop], "extra_body": {"ignore_eos": True}}
    chunks = list(idle.client.completions.create(**stopping, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == cut
    choice = idle.client.completions.create(**stopping).choices[0]
    assert (choice.text, choice.finish_reason, chunks[-1].choices[0].finish_reason) == (cut, "stop", "stop")
    extra = {"stop_token_ids": [token], "ignore_eos": True}
    answer = idle.client.completions.create(**fields, extra_body=extra)
    assert answer.choices[0].finish_reason == "stop" and wanted.text.startswith(answer.choices[0].text)
    assert answer.usage.completion_tokens == wanted.token_ids.index(token) + 1, "the stop token counts"


def test_chat_logprobs(idle: Live) -> None:
    fields = GREEDY | {"temperature": 0.7, "seed": 4, "logprobs": True, "top_logprobs": 2}
    fields |= {"extra_body": {"ignore_eos": True}}
    choice = idle.client.chat.completions.create(**fields).choices[0]
    _, *chunks = idle.client.chat.completions.create(**fields, stream=True)
    streamed = [item for chunk in chunks for item in chunk.choices[0].logprobs.content]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    wanted = offline(MESSAGES, temperature=0.7, seed=4, ignore_eos=True)
    assert "\ufffd" in text or "".join(item.token for item in streamed).replace(END, "") == text
    assert choice.message.content == text and len(wanted.token_ids) == 24
    with torch.no_grad():
        logits_TV = tiny_target().model(torch.tensor([[*wanted.prompt_ids, *wanted.token_ids]])).logits[0]
    logprob_TV = logits_TV.log_softmax(-1)[len(wanted.prompt_ids) - 1 :]
    for content in (choice.logprobs.content, streamed):
        assert all(bytes(item.bytes).decode() == item.token for item in content)
        for place, (token, item) in enumerate(zip(wanted.token_ids, content, strict=True)):
            assert math.isclose(item.logprob, logprob_TV[place, token].item(), abs_tol=1e-4)
            best = logprob_TV[place].topk(2)
            assert [top.logprob for top in item.top_logprobs] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_completion_logprobs(idle: Live) -> None:
    fields = {"model": MODEL, "prompt": "Once upon", "max_tokens": 12, "temperature": 0, "logprobs": 3}
    choice = idle.client.completions.create(**fields, extra_body={"ignore_eos": True}).choices[0]
    logprobs = choice.logprobs
    assert logprobs is not None
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset) == 12
    for token, value, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert len(top) <= 3 and max(top.values()) == value == top[token], "greedy takes the likeliest"
    assert logprobs.text_offset[0] == 0 and logprobs.text_offset == sorted(logprobs.text_offset)


def test_details_tell_where_tokens_came_from(idle: Live) -> None:
    extra = {"details": True, "ignore_eos": True}
    choice = idle.client.chat.completions.create(**GREEDY, extra_body=extra).choices[0]
    details = choice.details
    assert "".join(text for text, _ in details["tokens"]) == choice.message.content
    num_own = sum(not is_drafted for _, is_drafted in details["tokens"])
    assert details["num_tokens"] == 24 and num_own <= details["num_target_forwards"] < 24
    chunks = list(idle.client.chat.completions.create(**GREEDY, stream=True, extra_body=extra))[1:]
    assert [piece for chunk in chunks for piece in chunk.choices[0].details["tokens"]] == details["tokens"]
    tree = chunks[-1].choices[0].details["tree"]
    assert len(tree["tokens"]) == len(tree["parents"]) == 96 and tree["path"][0] == 0


def test_speculation_off(idle: Live) -> None:
    before = idle.metric("accepted_draft_tokens_total")
    extra = {"speculation": False, "details": True}
    choice = idle.client.chat.completions.create(**GREEDY, extra_body=extra).choices[0]
    assert choice.message.content == offline(MESSAGES).text
    assert not any(is_drafted for _, is_drafted in choice.details["tokens"])
    assert choice.details["num_target_forwards"] == choice.details["num_tokens"]
    assert idle.metric("accepted_draft_tokens_total") == before


def test_repeated_prompt_counts_cached_tokens(idle: Live) -> None:
    messages = [{"role": "user", "content": "A question that no other test asks, long enough to share."}]
    counts = []
    for _ in range(2):
        answer = idle.client.chat.completions.create(**(GREEDY | {"messages": messages}))
        counts.append(answer.usage.prompt_tokens_details.cached_tokens)
    assert counts[1] == answer.usage.prompt_tokens - 2 > counts[0]


def test_what_the_client_makes_of_refusals(idle: Live) -> None:
    client = idle.client
    assert [model.id for model in client.models.list()] == [MODEL]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**(GREEDY | {"messages": [{"role": "wizard", "content": "x"}]}))
    assert caught.value.param == "messages[0].role" and caught.value.type == "invalid_request_error"
    refused: list[tuple[dict[str, Any], str]] = [
        ({"prompt": "word " * 200}, "'context_length_exceeded'"),
        ({"prompt": "word " * 200, "stream": True}, "'context_length_exceeded'"),
        ({"prompt": [1, 10**30]}, "not in the vocabulary"),
        ({"prompt": ""}, "empty"),
        ({"prompt": "x", "n": 100}, "'param': 'n'"),
        ({"prompt": "x", "model": "gpt-4"}, "'param': 'model'"),
    ]
    for fields, words in refused:
        with pytest.raises((openai.BadRequestError, openai.NotFoundError)) as found:
            client.completions.create(**{"model": MODEL} | fields)
        assert words in str(found.value.body)
        assert (found.value.status_code == 404) == ("model" in fields)
