"""Prompts, exclusions, wanted answers: everything that happens before an answer."""

from collections import Counter
from pathlib import Path

import pytest

from drafter.data.formats import Row
from drafter.distill.prompts import EXCLUDED, AnswerSettings, missing_answers, select_prompts
from tests.data.tiny import chat, write_jsonl


def test_prompts_of_conversations_ids_and_duplicates(tmp_path: Path) -> None:
    rows: list[dict] = [{"id": "a", "prompt": "One?"}, {"id": "a", "prompt": "Two?"}, {"prompt": "One?"}]
    rows.append({"messages": chat("Three?", "Yes.", "Four?", "No.")})
    prompts, left_out = select_prompts(write_jsonl(tmp_path / "p.jsonl", rows))
    assert prompts[0].id == "a" and prompts[1].id.startswith("a-") and len({prompt.id for prompt in prompts}) == 3
    assert list(prompts[2].messages) == chat("Three?", "Yes.", "Four?") and left_out.total() == 1
    assert select_prompts(tmp_path / "p.jsonl", limit=2)[0] == prompts[:2]
    assert select_prompts(tmp_path / "p.jsonl")[0] == prompts
    with pytest.raises(ValueError, match="line 1: token ids are no prompt; the row needs messages or text too"):
        select_prompts(write_jsonl(tmp_path / "ids.jsonl", [{"prompt_token_ids": [1], "token_ids": [2]}]))
    name = write_jsonl(tmp_path / "text.jsonl", [{"text": "abc"}])
    assert select_prompts(name, columns={"prompt": "text"})[0][0].messages[0]["content"] == "abc"


def test_excluded_texts_are_left_out(tmp_path: Path) -> None:
    """Whole texts, and runs of 13 words, of all turns but system turns."""
    long = "Write a long and detailed letter to the mayor of our small town about the bridge"
    system = {"role": "system", "content": "You are a helpful assistant."}
    evaluation: list[dict] = [{"prompt": long}, {"text": "t"}, {"prompt": "Be brief."}]
    evaluation.append({"messages": [system, *chat("Why is it so?", "It is.", "Really?")]})
    evaluation.append({"question_id": 81, "turns": ["Write a letter.", "Now rewrite it in one sentence."]})
    exclude = write_jsonl(tmp_path / "x.jsonl", evaluation)
    questions = ("why IS it so", f"Please: {long}!", "Write a long letter to the mayor.", "t t", "really", "It is", "t")
    rows = [{"messages": [system, *chat(question)]} for question in questions]
    rows += [{"messages": [{"role": "developer", "content": "Be brief."}, *chat("Why do cats purr?")]}, {"text": long}]
    prompts, left_out = select_prompts(write_jsonl(tmp_path / "p.jsonl", rows), exclude=exclude)
    kept = ["Write a long letter to the mayor.", "t t", "Why do cats purr?"]
    assert [prompt.messages[-1]["content"] for prompt in prompts] == kept and left_out == {EXCLUDED: 6}
    with pytest.raises(ValueError, match="no prompt is left .1 are on"):
        select_prompts(write_jsonl(tmp_path / "q.jsonl", rows[:1]), exclude=exclude)


PROMPTS = [Row(id=f"p{number}", messages=tuple(chat(f"Question {number}?"))) for number in range(40)]


def test_jobs_have_their_own_seeds_and_temperatures() -> None:
    settings = AnswerSettings(temperature=(0.0, 0.7, 1.0), num_answers=3, seed=4)
    wanted = missing_answers(PROMPTS, settings, set())
    assert len(wanted) == 120 and len({item.params.seed for item in wanted}) == 120
    assert all(0 <= item.params.seed < 2**63 for item in wanted)
    for start in range(0, 120, 3):
        assert sorted(item.params.temperature for item in wanted[start : start + 3]) == [0.0, 0.7, 1.0]
    done = {(wanted[place].prompt.id, wanted[place].number) for place in (5, 7)}
    assert missing_answers(PROMPTS, settings, done) == [*wanted[:5], wanted[6], *wanted[8:]]
    single = missing_answers(PROMPTS, AnswerSettings(temperature=(0.0, 1.0), seed=5), set())
    assert {item.params.seed for item in wanted}.isdisjoint(item.params.seed for item in single)
    assert min(Counter(item.params.temperature for item in single).values()) >= 12, "single answers use both too"


def test_temperatures_that_make_no_answers_or_the_same_ones_are_refused() -> None:
    with pytest.raises(ValueError, match="names no temperature"):
        AnswerSettings(temperature=())
    with pytest.raises(ValueError, match="greedy answers to one prompt are all the same"):
        AnswerSettings(num_answers=2)
