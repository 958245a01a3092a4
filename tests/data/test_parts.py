"""The rows of a training: reading, splitting, and what the training asks of them."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from drafter.data.options import DataOptions
from drafter.data.parts import Parts, read_parts
from drafter.data.rows import split_by_prompt
from tests.data.tiny import chat, tiny_target, write_jsonl

TARGET = tiny_target()


def parts_of(folder: Path, target: Any = TARGET, **options: Any) -> Parts:
    """40 answers to 20 prompts."""
    rows = [{"messages": chat(f"question {i % 20}", "and " * (1 + i % 7) + str(i))} for i in range(40)]
    return read(write_jsonl(folder / "train.jsonl", rows), target, **{"val": 0.2, **options})


def read(train: str, target: Any = TARGET, **options: Any) -> Parts:
    return read_parts([train], target, DataOptions(**{"max_length": 128, "batch_tokens": 140, **options}))


def test_held_out_prompts_keep_all_their_answers(tmp_path: Path) -> None:
    train, val = parts_of(tmp_path)
    asked = [{tuple(part.prompt_ids(row)) for row in range(len(part))} for part in (train, val)]
    assert not asked[0] & asked[1] and len(asked[1]) == 4
    assert len(train) == 32 and len(val) == 8
    shuffled, _ = split_by_prompt(train.select(list(range(31, -1, -1))), 0.1)
    assert len(shuffled) == 32 - 4
    counts_V = train.token_counts(300)  # of answers
    end, opening = TARGET.tokenizer.convert_tokens_to_ids(["<|end|>", "<|bot|>"])
    assert counts_V.shape == (300,) and int(counts_V.sum()) == train.num_trained_tokens
    assert (int(counts_V[end]), int(counts_V[opening])) == (32, 0)
    prompts = val.prompts(99)
    assert len(prompts) == len(set(map(tuple, prompts))) == 4 and val.prompts(3) == prompts[:3]
    for text in map(TARGET.tokenizer.decode, prompts):
        assert text.startswith("<s><|user|>\nquestion ") and text.endswith("<|end|>\n<|bot|>\n")


def test_prompts_of_plain_text_are_its_first_tokens(tmp_path: Path) -> None:
    texts = ["a long text that goes on " * 3, "abcd", "ab", "x"]
    val = write_jsonl(tmp_path / "val.jsonl", [{"text": text} for text in texts])
    ids = [TARGET.tokenizer(text)["input_ids"] for text in texts]
    assert [len(row) for row in ids][1:] == [4, 2, 1] and len(ids[0]) > 33
    found = parts_of(tmp_path, val=val).val.prompts(8)
    assert found == [ids[0][:32], ids[1][:3]], "nothing would be left to answer of the others"
    short = write_jsonl(tmp_path / "short.jsonl", [{"text": "ab"}])
    with pytest.raises(ValueError, match="no held-out row gives a prompt of at least 2 tokens"):
        parts_of(tmp_path, val=(short,)).val.prompts(8)


def test_ids_that_the_target_has_and_the_tokenizer_lacks(tmp_path: Path) -> None:
    """Output matrices have rows to spare, and sampling reaches them."""
    rows = [{"prompt_token_ids": [5, 6 + i], "token_ids": [299]} for i in range(4)]
    found = read(write_jsonl(tmp_path / "ids.jsonl", rows), tiny_target(vocab_size=300), val=0.3)
    assert int(found.train.token_counts(300)[299]) == 3


def test_answers_of_another_target_are_refused(tmp_path: Path) -> None:
    """As the settings file of `drafter distill` beside them says; files without one are taken as they are."""
    for fingerprint, is_own in ((TARGET.fingerprint, True), (tiny_target(seed=1).fingerprint, False), ("?", False)):
        (tmp_path / "train.jsonl.settings.json").write_text(json.dumps({"target_fingerprint": fingerprint}))
        parts_of(tmp_path, foreign_answers=True)
        with contextlib.nullcontext() if is_own else pytest.raises(ValueError, match="another target .* wrote these"):
            parts_of(tmp_path)
    (tmp_path / "train.jsonl.settings.json").write_text('{"endpoint_model": "m"}')
    parts_of(tmp_path)


def test_bad_rows(tmp_path: Path) -> None:
    one = write_jsonl(tmp_path / "one.jsonl", [{"messages": chat("a", "b")}])
    with pytest.raises(ValueError, match="hold one prompt, so no prompt can be held out"):
        read(one)
    bare = tiny_target()
    bare.tokenizer = None
    with pytest.raises(ValueError, match="the folder holds no tokenizer"):
        read(one, bare)
