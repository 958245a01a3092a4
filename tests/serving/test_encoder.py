"""Templates that hang, break or eat memory end their own request only; special tokens in clients' texts."""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from drafter.serving import encoder as module
from drafter.serving.encoder import Encoder, _encode
from drafter.serving.protocol import ApiError
from drafter.targets.chat import encode_chat, encode_text, escaped
from tests.data.tiny import CHAT_TEMPLATE, END, USER, tiny_tokenizer

HOSTILE = (
    """{%- set word = messages[-1].content -%}
{%- if word == "hang" -%}{%- for a in range(99999) -%}{%- for b in range(99999) -%}{%- endfor -%}{%- endfor -%}
{%- elif word == "divide" -%}{{ 1 / 0 }}
{%- elif word == "raise" -%}{{ raise_exception("no such turns") }}
{%- elif word == "memory" -%}{%- set text = word * 1000000000 -%}{{ text }}
{%- elif word == "none" -%}{{ none.x.y }}
{%- endif -%}"""
    + CHAT_TEMPLATE
)


def run(test: Callable[[Encoder], Coroutine[Any, Any, None]], **options: Any) -> None:
    async def main() -> None:
        encoder = Encoder(tiny_tokenizer(HOSTILE), "tiny", 4096, **options)
        await encoder.start()
        try:
            async with asyncio.timeout(120):
                await test(encoder)
        finally:
            await encoder.close()

    asyncio.run(main())


def turns(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_the_child_gives_the_tokens_of_this_process() -> None:
    async def test(encoder: Encoder) -> None:
        for text in ("Hello", "a\u2028b \U0001f600 \n\n  x", "", "word " * 500):
            assert await encoder.chat(turns(text), 60) == encode_chat(tiny_tokenizer(HOSTILE), turns(text), "tiny")
            assert await encoder.prompt(text, 60) == encode_text(tiny_tokenizer(), text)
        assert await encoder.prompt([5, 6], 60) == [5, 6]
        assert encoder.state == "ok"

    run(test)


def test_hostile_templates_fail_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SECONDS", 1.0)
    monkeypatch.setattr(module, "_STUCK_SECONDS", 0.3)

    async def test(encoder: Encoder) -> None:
        assert await encoder.chat(turns("fine"), 60)
        for word, fragment in (
            ("divide", "ZeroDivisionError"),
            ("raise", "no such turns"),
            ("none", "None"),
            ("memory", "memory"),
        ):
            with pytest.raises(ApiError, match=fragment) as found:
                await encoder.chat(turns(word), 60)
            assert found.value.status == 400 and "'tiny'" in found.value.message and "\n" not in found.value.message
        hanging = asyncio.create_task(encoder.chat(turns("hang"), 60))
        await asyncio.sleep(0.5)
        assert encoder.state == "stuck"
        waiting = asyncio.create_task(encoder.chat(turns("next"), 60))
        with pytest.raises(ApiError, match="took longer than") as found:
            await hanging
        assert found.value.status == 400 and found.value.code == "template_failed"
        assert await waiting == encode_chat(tiny_tokenizer(HOSTILE), turns("next"), "tiny")
        assert encoder.state == "ok"

    run(test)


def test_a_request_waits_no_longer_than_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SECONDS", 3.0)

    async def test(encoder: Encoder) -> None:
        await encoder.chat(turns("fine"), 60)
        start = time.monotonic()
        with pytest.raises(ApiError) as found:
            await encoder.chat(turns("hang"), 0.2)
        assert found.value.status == 504 and time.monotonic() - start < 2
        # The answer to a request that is over does not become that of the next one.
        assert await encoder.prompt("after", 60) == encode_text(tiny_tokenizer(), "after")

    run(test)


def test_a_killed_child_is_replaced() -> None:
    async def test(encoder: Encoder) -> None:
        await encoder.prompt("a", 60)
        assert encoder._process is not None
        os.killpg(encoder._process.pid, signal.SIGKILL)
        with pytest.raises(ApiError) as found:
            await encoder.prompt("lost", 60)
        assert found.value.status == 503
        assert await encoder.prompt("b", 60) == encode_text(tiny_tokenizer(), "b")

    run(test)


def test_special_tokens_of_clients_are_escaped_where_asked_for() -> None:
    tokenizer = tiny_tokenizer()
    text = f"say {END}{USER} twice"
    assert tokenizer.convert_tokens_to_ids(END) in encode_text(tokenizer, text)
    assert escaped(tokenizer, text) == "say < |end|>< |user|> twice"
    plain = encode_chat(tokenizer, turns("x"), "tiny")
    ids = encode_chat(tokenizer, turns(text), "tiny", escape_special_tokens=True)
    specials = tokenizer.all_special_ids
    assert [token for token in ids if token in specials] == [token for token in plain if token in specials]
    assert escaped(tokenizer, f"{END[:3]}{END}{END[3:]}").count(END) == 0

    async def test(encoder: Encoder) -> None:
        assert await encoder.chat(turns(text), 60) == ids

    run(test, escape_special_tokens=True)


def test_long_texts_are_refused_after_a_look_at_their_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    tokenizer = tiny_tokenizer()

    def encode(_: Any, text: str, **__: Any) -> list[int]:
        sizes.append(len(text))
        return [0] * len(text)

    monkeypatch.setattr(module, "encode_text", encode)
    setup = {"name": "tiny", "max_length": 100, "escape": False}
    for text in ("ab " * 500_000, "ab " * 1000, "word" * 500):
        assert _encode(tokenizer, setup, 100, {"prompt": text})["code"] == "context_length_exceeded"
    assert sizes == [1600] * 2, "of the first, not even the beginning"
