"""Templates that hang, break or eat memory end their own request only; special tokens in clients' texts."""

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from drafter.serving.encoder import Encoder
from drafter.serving.protocol import ApiError
from drafter.targets import chat
from drafter.targets.chat import Chat, encode_chat, encode_text, escaped
from drafter.targets.target import Target
from tests.data.tiny import CHAT_TEMPLATE, END, USER, tiny_tokenizer

HOSTILE = (
    """{%- set word = messages[-1].content -%}
{%- if word == "hang" -%}{%- for a in range(99999) -%}{%- for b in range(99999) -%}{%- endfor -%}{%- endfor -%}
{%- elif word == "divide" -%}{{ 1 / 0 }}
{%- elif word == "raise" -%}{{ raise_exception("no such turns") }}
{%- elif word == "memory" -%}{%- set text = word * 1000000000 -%}{{ text }}
{%- endif -%}"""
    + CHAT_TEMPLATE
)


def run(test: Callable[[Encoder], Coroutine[Any, Any, None]], *, template: str = HOSTILE, **options: Any) -> None:
    async def main() -> None:
        target = Target.__new__(Target)
        target.tokenizer, target.name = tiny_tokenizer(template), "/secret/tiny"
        encoder = Encoder(target, "tiny", 4096, **options)
        await encoder.start()
        try:
            async with asyncio.timeout(120):
                await test(encoder)
        finally:
            await encoder.close()

    asyncio.run(main())


def turns(text: str) -> Chat:
    return Chat([{"role": "user", "content": text}])


def test_hostile_templates_fail_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(encoder: Encoder) -> None:
        assert await encoder.encode(turns("fine"))
        for word, fragment in (("divide", "ZeroDivisionError"), ("raise", "no such turns"), ("memory", "memory")):
            with pytest.raises(ApiError, match=fragment) as found:
                await encoder.encode(turns(word))
            assert found.value.status_code == 400 and "'tiny'" in found.value.detail and "\n" not in found.value.detail
        hanging = asyncio.create_task(encoder.encode(turns("hang")))
        await asyncio.sleep(0.1)
        waiting = asyncio.create_task(encoder.encode(turns("next")))
        with pytest.raises(ApiError, match="took longer than") as found:
            await hanging
        assert found.value.status_code == 400
        assert await waiting == encode_chat(tiny_tokenizer(HOSTILE), turns("next").messages, "tiny")

    monkeypatch.setattr(chat, "MAX_SECONDS", 1.0)
    run(test)


def test_a_client_that_leaves_and_a_killed_child_leave_nothing_to_the_next() -> None:
    async def test(encoder: Encoder) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):  # the exchange with the process begins all the same
                await encoder.encode(turns("word " * 2_000))
        assert await encoder.encode("after") == encode_text(tiny_tokenizer(), "after")
        hanging = asyncio.create_task(encoder.encode(turns("hang")))
        await asyncio.sleep(0.2)
        os.kill(encoder._target.encoder._child.pid, signal.SIGKILL)
        with pytest.raises(ApiError) as found:
            await hanging
        assert found.value.status_code == 503
        assert await encoder.encode("b") == encode_text(tiny_tokenizer(), "b")

    run(test)


def test_special_tokens_of_clients_are_escaped_where_asked_for() -> None:
    tokenizer = tiny_tokenizer()
    text = f"say {END}{USER} twice"
    assert tokenizer.convert_tokens_to_ids(END) in encode_text(tokenizer, text)
    assert escaped(tokenizer, text) == "say < |end|>< |user|> twice"
    plain = encode_chat(tokenizer, turns("x").messages, "tiny")
    ids = encode_chat(tokenizer, turns(text).messages, "tiny", escape_special_tokens=True)
    specials = tokenizer.all_special_ids
    assert [token for token in ids if token in specials] == [token for token in plain if token in specials]
    assert escaped(tokenizer, f"{END[:3]}{END}{END[3:]}").count(END) == 0

    async def test(encoder: Encoder) -> None:
        assert await encoder.encode(turns(text)) == ids

    run(test, escape_special_tokens=True)


@pytest.mark.parametrize(
    "template", ["{% if %}", "{%- for a in range(99999) -%}{%- for b in range(99999) -%}{%- endfor -%}{%- endfor -%}"]
)
def test_a_template_that_never_works_costs_no_client_its_time(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large one takes seconds to fail, under the one lock."""

    async def test(encoder: Encoder) -> None:
        asked: list[Any] = []
        exchange = encoder._exchange
        encoder._exchange = lambda text: (asked.append(text), exchange(text))[1]  # type: ignore[method-assign]
        for _ in range(2):
            with pytest.raises(ApiError, match="chat template") as found:
                await encoder.encode(turns("fine"))
            assert found.value.status_code == 400
        assert not asked, "the start has seen it"
        assert await encoder.encode("a text") == encode_text(tiny_tokenizer(), "a text")

    monkeypatch.setattr(chat, "MAX_SECONDS", 1.0)
    run(test, template=template)
