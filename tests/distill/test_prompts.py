"""Prompts, exclusions, wanted answers: everything that happens before an answer."""

from collections import Counter
from pathlib import Path

import pytest

from drafter.distill.prompts import (
    AnswerSettings,
    Exclusion,
    PromptRow,
    builtin_prompts,
    missing_answers,
    select_prompts,
)
from tests.data.tiny import chat, write_jsonl


def test_the_package_brings_its_own_prompts() -> None:
    found = select_prompts(builtin_prompts())
    assert len(found.prompts) >= 100 and found.num_duplicates == 0
    assert all(len(prompt.messages) == 1 and prompt.source == "drafter" for prompt in found.prompts)


def test_prompts_of_conversations_ids_and_duplicates(tmp_path: Path) -> None:
    rows = [
        {"id": "a", "prompt": "One?"},
        {"id": "a", "prompt": "Two?"},
        {"prompt": "One?"},
        {"messages": chat("Three?", "Yes.", "Four?", "No."), "source": "talk"},
    ]
    found = select_prompts(write_jsonl(tmp_path / "p.jsonl", rows))
    assert [prompt.id for prompt in found.prompts][0] == "a" and len({prompt.id for prompt in found.prompts}) == 3
    assert found.prompts[1].id.startswith("a-")
    assert found.num_duplicates == 1
    assert list(found.prompts[2].messages) == chat("Three?", "Yes.", "Four?") and found.prompts[2].source == "talk"
    assert found.prompts[0].source == "p.jsonl"
    assert select_prompts(tmp_path / "p.jsonl", limit=2).prompts == found.prompts[:2]
    assert select_prompts(tmp_path / "p.jsonl").prompts == found.prompts


def test_excluded_texts_are_left_out(tmp_path: Path) -> None:
    long = "Write a long and detailed letter to the mayor of our small town about the bridge"
    exclude = Exclusion.read(
        write_jsonl(tmp_path / "x.jsonl", [{"prompt": "Why is it so?"}, {"prompt": long}, {"text": "t"}])
    )
    rows = [
        {"prompt": p} for p in ("why IS it so", "Please: " + long + "!", "Write a long letter to the mayor.", "t t")
    ]
    found = select_prompts(write_jsonl(tmp_path / "p.jsonl", rows), exclude=exclude)
    assert [prompt.messages[0]["content"] for prompt in found.prompts] == ["Write a long letter to the mayor.", "t t"]
    assert found.num_excluded == 2
    assert not Exclusion.read(None).matches("anything")
    with pytest.raises(ValueError, match="no prompt is left .1 are on"):
        select_prompts(write_jsonl(tmp_path / "q.jsonl", rows[:1]), exclude=exclude)


def test_system_messages_exclude_nothing(tmp_path: Path) -> None:
    system = {"role": "system", "content": "You are a helpful assistant."}
    evaluation = [{"messages": [system, *chat("Why is it so?", "It is.", "Really?")]}, {"prompt": "Be brief."}]
    evaluation.append({"question_id": 81, "turns": ["Write a letter.", "Now rewrite it in one sentence."]})
    exclude = Exclusion.read(write_jsonl(tmp_path / "x.jsonl", evaluation))
    rows = [{"messages": [system, *chat(question)]} for question in ("How do bees sleep?", "really", "It is")]
    rows.append({"messages": [{"role": "developer", "content": "Be brief."}, *chat("Why do cats purr?")]})
    found = select_prompts(write_jsonl(tmp_path / "p.jsonl", rows), exclude=exclude)
    assert [p.messages[-1]["content"] for p in found.prompts] == ["How do bees sleep?", "Why do cats purr?"]
    assert found.num_excluded == 2 and not exclude.matches(system["content"])
    assert exclude.matches("write a letter") and exclude.matches("Now rewrite it in one sentence")


def test_text_rows_are_no_prompts(tmp_path: Path) -> None:
    name = write_jsonl(tmp_path / "p.jsonl", [{"text": "abc"}])
    with pytest.raises(ValueError, match="line 1: plain text is no prompt; name the key with --column"):
        select_prompts(name)
    assert select_prompts(name, columns={"prompt": "text"}).prompts[0].messages[0]["content"] == "abc"


PROMPTS = [PromptRow(f"p{number}", tuple(chat(f"Question {number}?")), "test") for number in range(40)]


def test_jobs_have_their_own_seeds_and_temperatures() -> None:
    settings = AnswerSettings(temperature=(0.0, 0.7, 1.0), num_answers=3, seed=4)
    wanted = missing_answers(PROMPTS, settings, set())
    assert len(wanted) == 120 and len({item.params.seed for item in wanted}) == 120
    assert all(0 <= item.params.seed < 2**63 for item in wanted)
    for start in range(0, 120, 3):
        assert sorted(item.params.temperature for item in wanted[start : start + 3]) == [0.0, 0.7, 1.0]
    done = {wanted[5].key, wanted[7].key}
    assert missing_answers(PROMPTS, settings, done) == [item for item in wanted if item.key not in done]
    assert {item.params.seed for item in wanted}.isdisjoint(
        item.params.seed for item in missing_answers(PROMPTS, AnswerSettings(seed=5), set())
    )


def test_a_mix_is_kept_with_one_answer_per_prompt() -> None:
    settings = AnswerSettings(temperature=(0.0, 1.0))
    counts = Counter(item.params.temperature for item in missing_answers(PROMPTS, settings, set()))
    assert min(counts.values()) >= 12


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": ()}, "names no temperature"),
        ({"temperature": (float("nan"),)}, "--temperature is nan"),
        ({"num_answers": 2}, "greedy answers to one prompt are all the same"),
    ],
)
def test_bad_settings(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AnswerSettings(**change)
