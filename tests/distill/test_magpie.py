"""Invented prompts: the opening of the user's turn, the filters, and interruptions."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from drafter.data.reading import BUILTIN_PROMPTS
from drafter.decoding.params import SamplingParams
from drafter.distill.magpie import invent_prompts, problem_of, user_opening
from drafter.distill.prompts import select_prompts
from tests.data.tiny import CHAT_TEMPLATE, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
SPECIAL = ["<s>", "<|user|>", "<|bot|>", "<|end|>"]


WORDS = "{% for m in messages %}{{ '### ' + m['role'] + ': ' + m['content'] + '\n### end' }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "text", "stop_ids", "stop"),
    [(CHAT_TEMPLATE, "<s><|user|>\n", (3,), ()), (WORDS, "### user:", (), ("### end",))],
    ids=["by a token", "by words"],
)
def test_the_opening_comes_from_the_template(template: str, text: str, stop_ids: tuple, stop: tuple) -> None:
    tokenizer = tiny_tokenizer(template)
    opening_ids, params = user_opening(tokenizer, "tiny")
    assert tokenizer.decode(opening_ids) == text
    assert params.stop_token_ids == stop_ids and params.stop == stop


@pytest.mark.parametrize(
    "template", [CHAT_TEMPLATE + "{{ messages[0]['content'] }}", "{{ 'user: ' + messages[0]['content'] }}"]
)
def test_templates_that_cannot_be_opened(template: str) -> None:
    with pytest.raises(ValueError, match="of target 'tiny' does not open, show once and end a user message"):
        user_opening(tiny_tokenizer(template), "tiny")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("What is the capital of Norway?", None),
        ("Why?", "too short"),
        ("What is \ufffd in this text here?", "damaged characters"),
        ("What is this?<|bot|>Something.", "template tokens"),
        ("again and " * 40, "repeats itself"),
    ],
)
def test_filters(text: str, problem: str | None) -> None:
    assert problem_of(text, SPECIAL) == problem


class FakeEngine:
    """Candidate texts that follow from the seed, some of them unusable."""

    target = SimpleNamespace(
        tokenizer=TOKENIZER, name="tiny", decode=lambda ids: TOKENIZER.decode(ids, skip_special_tokens=True)
    )
    after = ""

    def __init__(self, num_texts: int = 10**6) -> None:
        self.num_texts = num_texts

    def generate(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> Iterator[SimpleNamespace]:
        for seed in (item.seed for item in params):
            text = (" short {}", " about number {}, my friend?")[seed % 2].format(seed % self.num_texts) + self.after
            token_ids = [*TOKENIZER(text, add_special_tokens=False)["input_ids"], 3]
            yield SimpleNamespace(token_ids=token_ids, finish_reason="stop" if seed % 5 else "length")


def invent(path: Path, engine: Any, num_prompts: int):
    dropped = invent_prompts(path, engine, num_prompts, recorded={"target": "tiny"}, seed=1)
    return select_prompts(path, limit=num_prompts)[0], dropped


def test_invented_prompts_are_usable_and_the_same_after_interruptions(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    few, dropped = invent(path, FakeEngine(), 30)
    assert dropped["too short"] > 0 and dropped["cut"] > 0
    prompts, _ = invent(path, FakeEngine(), 200)
    assert few == prompts[:30] and len({prompt.id for prompt in prompts}) == 200
    assert all(problem_of(prompt.messages[0]["content"], SPECIAL) is None for prompt in prompts)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert invent(path, FakeEngine(), 200)[0] == prompts and path.read_bytes() == whole
    assert invent(path, SimpleNamespace(target=FakeEngine.target), 200) == (prompts, {}), "nothing is asked again"


def test_half_of_the_questions_begin_with_words_of_the_package(tmp_path: Path) -> None:
    texts = [prompt.messages[0]["content"] for prompt in invent(tmp_path / "p.jsonl", FakeEngine(), 200)[0]]
    begun = [re.split(" about number| short", text)[0] for text in texts if not text.startswith("about")]
    assert 100 < len(begun) < 150 and {"What is the", "List"} <= set(begun)
    package = [prompt.messages[0]["content"] for prompt in select_prompts(BUILTIN_PROMPTS)[0]]
    for text in begun:
        assert len(text.split()) <= 4 and any(prompt.startswith(text + " ") for prompt in package), text


def test_words_that_end_a_turn_are_cut(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.target = SimpleNamespace(tokenizer=tiny_tokenizer(WORDS), name="tiny", decode=TOKENIZER.decode)
    engine.after = "\n### end"
    prompts, _ = invent(tmp_path / "p.jsonl", engine, 30)
    assert all(re.search(r"(my friend\?|short \d+)$", prompt.messages[0]["content"]) for prompt in prompts)


def test_repeated_texts_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drafter.distill.magpie.first_words", lambda prompts, seed: "")
    prompts, dropped = invent(tmp_path / "p.jsonl", FakeEngine(num_texts=40), 12)
    assert len({prompt.messages[0]["content"] for prompt in prompts}) == 12 and dropped["seen before"] > 0
    with pytest.raises(ValueError, match="'tiny' invented .* of 60 usable prompts and then no more .*seen before"):
        invent(tmp_path / "r.jsonl", FakeEngine(num_texts=5), 60)
