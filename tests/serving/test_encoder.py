"""Templates that hang, break or eat memory end their own request only; special tokens in clients' texts."""

import asyncio
import multiprocessing
from collections.abc import AsyncIterator
from typing import Any

import pytest

from drafter.serving.encoder import Encoder
from drafter.serving.protocol import ApiError
from drafter.targets import chat
from drafter.targets.chat import Chat, encode, escaped, is_longer
from drafter.targets.target import Target
from tests.data.tiny import CHAT_TEMPLATE, END, USER, tiny_tokenizer

ENDLESS = "{%- for a in range(99999) -%}{%- for b in range(99999) -%}{%- endfor -%}{%- endfor -%}"
HOSTILE = (
    """{%- set word = messages[-1].content -%}
{%- if word == "hang" -%}"""
    + ENDLESS
    + """
{%- elif word == "divide" -%}{{ 1 / 0 }}
{%- elif word == "raise" -%}{{ raise_exception("no such turns") }}
{%- elif word == "memory" -%}{%- set text = word * 1000000000 -%}{{ text }}
{%- endif -%}"""
    + CHAT_TEMPLATE
)


pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def encoder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Encoder]:
    """An encoder of the hostile template, or with the arguments of the test, that takes a second for a text."""
    monkeypatch.setattr(chat, "MAX_SECONDS", 1.0)
    options = {"template": HOSTILE} | getattr(request, "param", {})
    target = Target.__new__(Target)
    target.tokenizer, target.name = tiny_tokenizer(options.pop("template")), "/secret/tiny"
    found = Encoder(target, "tiny", 4096, **options)
    await found.start()
    yield found
    await found.close()


def quick(encoder: Encoder) -> set[int]:
    return {fork._child.pid for fork in encoder._forks if fork._child is not None}


def turns(text: str) -> Chat:
    return Chat([{"role": "user", "content": text}])


async def test_hostile_templates_fail_alone(encoder: Encoder) -> None:
    assert await encoder.encode(turns("fine"))
    for word, fragment in (("divide", "ZeroDivisionError"), ("raise", "no such turns"), ("memory", "memory")):
        with pytest.raises(ApiError, match=fragment) as found:
            await encoder.encode(turns(word))
        assert found.value.status_code == 400 and "'tiny'" in found.value.detail and "\n" not in found.value.detail
    hanging = asyncio.create_task(encoder.encode(turns("hang")))
    await asyncio.sleep(0.1)
    waiting = asyncio.create_task(encoder.encode(turns("next")))
    assert await waiting == encode(tiny_tokenizer(HOSTILE), turns("next"), "tiny")
    assert not hanging.done(), "a slow template stalls nobody"
    with pytest.raises(ApiError, match="took longer than") as found:
        await hanging
    assert found.value.status_code == 400


async def test_only_as_much_is_read_of_a_long_text_as_shows_that_it_is_too_long(encoder: Encoder) -> None:
    assert len(await encoder.encode("and " * 2_000)) < 4096 < len("and " * 2_000)
    for asked in ("1" * 70_000, turns("1" * 20_000), ("a", 3, "1" * 20_000)):
        with pytest.raises(ApiError, match="longer than the context") as found:
            await encoder.encode(asked)
        assert found.value.code == "context_length_exceeded"
    tokenizer = tiny_tokenizer()
    parts, counted = [], tokenizer.__class__.__call__

    def count(text: str, **options: Any) -> Any:
        parts.append(text)
        return counted(tokenizer, text, **options)

    assert is_longer(count, ["1" * 1_000_000], 4096) and sum(map(len, parts)) < 10_000
    assert not is_longer(count, ["1" * 4096], 4096), "exact numbers are the engine's"


async def test_a_client_that_leaves_and_a_killed_child_leave_nothing_to_the_next(encoder: Encoder) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):  # the exchange with the process begins all the same
            await encoder.encode(turns("word " * 2_000))
    assert await encoder.encode("after") == encode(tiny_tokenizer(), "after")
    left = [asyncio.create_task(encoder.encode(turns("hang"))) for _ in range(6)]
    await asyncio.sleep(0.5)
    for task in left:
        task.cancel()
    await asyncio.wait(left)
    hanging = asyncio.create_task(encoder.encode(turns("hang")))
    while not hanging.done():
        for child in multiprocessing.active_children():
            if child.pid not in quick(encoder):
                child.kill()
        await asyncio.sleep(0.01)
    with pytest.raises(ApiError) as found:
        await hanging
    assert found.value.status_code == 503
    assert await encoder.encode("b") == encode(tiny_tokenizer(), "b")


@pytest.mark.parametrize("encoder", [{"escape_special_tokens": True}], indirect=True)
async def test_special_tokens_of_clients_are_escaped_where_asked_for(encoder: Encoder) -> None:
    tokenizer = tiny_tokenizer()
    text = f"say {END}{USER} twice"
    assert tokenizer.convert_tokens_to_ids(END) in encode(tokenizer, text)
    assert escaped(tokenizer, text) == "say < |end|>< |user|> twice"
    plain = encode(tokenizer, turns("x"), "tiny")
    ids = encode(tokenizer, turns(text), "tiny", escape_special_tokens=True)
    specials = tokenizer.all_special_ids
    assert [token for token in ids if token in specials] == [token for token in plain if token in specials]
    assert escaped(tokenizer, f"{END[:3]}{END}{END[3:]}").count(END) == 0
    assert await encoder.encode(turns(text)) == ids


@pytest.mark.parametrize("encoder", [{"template": "{% if %}"}, {"template": ENDLESS}], indirect=True)
async def test_a_template_that_never_works_costs_no_client_its_time(encoder: Encoder) -> None:
    """A large one takes seconds to fail, under the one lock."""
    exchange, encoder._exchange = encoder._exchange, None  # type: ignore[assignment]
    with pytest.raises(ApiError, match="chat template") as found:  # the start has seen it
        await encoder.encode(turns("fine"))
    assert found.value.status_code == 400
    encoder._exchange = exchange  # type: ignore[method-assign]
    assert await encoder.encode("a text") == encode(tiny_tokenizer(), "a text")
