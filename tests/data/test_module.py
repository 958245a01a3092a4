"""ChatDataModule: reading, splitting, and what training asks of the rows."""

import contextlib
import json
from pathlib import Path

import pytest
from transformers import LlamaConfig

from drafter.data.module import ChatDataModule
from drafter.data.rows import split_by_prompt
from tests.data.tiny import chat, save_tiny_target, tiny_target, write_jsonl


@pytest.fixture
def target(tmp_path: Path) -> str:
    return save_tiny_target(tmp_path / "target")


def module_of(tmp_path: Path, target: str, **options) -> ChatDataModule:
    """40 answers to 20 prompts."""
    rows = [{"messages": chat(f"question {i % 20}", "and " * (1 + i % 7) + str(i))} for i in range(40)]
    settings = {"val": 0.2, "max_length": 128, "batch_tokens": 140, **options}
    return read(write_jsonl(tmp_path / "train.jsonl", rows), target, **settings)


def read(train: str, target: str, **options) -> ChatDataModule:
    data = ChatDataModule(train, target, **options)
    data.setup()
    return data


def test_held_out_prompts_keep_all_their_answers(tmp_path: Path, target: str) -> None:
    data = module_of(tmp_path, target)
    asked = [{tuple(s.prompt_ids(row)) for row in range(len(s))} for s in (data.rows["train"], data.rows["val"])]
    assert not asked[0] & asked[1] and len(asked[1]) == 4
    assert len(data.rows["train"]) == 32 and len(data.rows["val"]) == 8
    shuffled, _ = split_by_prompt(data.rows["train"].select(list(range(31, -1, -1))), 0.1)
    assert len(shuffled) == 32 - 4
    counts_V = data.token_counts(300)  # of answers
    end, opening = data.tokenizer.convert_tokens_to_ids(["<|end|>", "<|bot|>"])
    assert counts_V.shape == (300,) and int(counts_V.sum()) == data.rows["train"].num_trained_tokens
    assert (int(counts_V[end]), int(counts_V[opening])) == (32, 0)
    prompts = data.val_prompts(99)
    assert len(prompts) == len(set(map(tuple, prompts))) == 4 and data.val_prompts(3) == prompts[:3]
    for text in map(data.tokenizer.decode, prompts):
        assert text.startswith("<s><|user|>\nquestion ") and text.endswith("<|end|>\n<|bot|>\n")


def test_val_prompts_of_plain_text_are_its_first_tokens(tmp_path: Path, target: str) -> None:
    texts = ["a long text that goes on " * 3, "abcd", "ab", "x"]
    val = write_jsonl(tmp_path / "val.jsonl", [{"text": text} for text in texts])
    data = module_of(tmp_path, target, val=val)
    ids = [data.tokenizer(text)["input_ids"] for text in texts]
    assert [len(row) for row in ids][1:] == [4, 2, 1] and len(ids[0]) > 33
    assert data.val_prompts(8) == [ids[0][:32], ids[1][:3]], "nothing would be left to answer of the others"
    short = write_jsonl(tmp_path / "short.jsonl", [{"text": "ab"}])
    with pytest.raises(ValueError, match="no held-out row gives a prompt of at least 2 tokens"):
        module_of(tmp_path, target, val=short).val_prompts(8)


def test_ids_that_the_target_has_and_the_tokenizer_lacks(tmp_path: Path, target: str) -> None:
    """Output matrices have rows to spare, and sampling reaches them."""
    rows = [{"prompt_token_ids": [5, 6 + i], "token_ids": [299]} for i in range(4)]
    name = write_jsonl(tmp_path / "ids.jsonl", rows)
    with pytest.raises(ValueError, match="token id 299 is outside the target's vocabulary"):
        read(name, target)
    LlamaConfig(vocab_size=300).save_pretrained(target)
    data = read(name, target, val=0.3)
    assert int(data.token_counts(300)[299]) == 3


def test_answers_of_another_target_are_refused(tmp_path: Path, target: str) -> None:
    """As the settings file of `drafter distill` beside them says; files without one are taken as they are."""
    own = tiny_target()
    for fingerprint, is_own in ((own.fingerprint, True), (tiny_target(seed=1).fingerprint, False), ("?", False)):
        (tmp_path / "train.jsonl.settings.json").write_text(json.dumps({"target_fingerprint": fingerprint}))
        module_of(tmp_path, target, foreign_answers=True).cache_states(own, draft_length=3)
        with contextlib.nullcontext() if is_own else pytest.raises(ValueError, match="another target .* wrote these"):
            module_of(tmp_path, target).cache_states(own, draft_length=3)
    (tmp_path / "train.jsonl.settings.json").write_text('{"endpoint_model": "m"}')
    module_of(tmp_path, target).cache_states(own, draft_length=3)


def test_bad_data(tmp_path: Path, target: str) -> None:
    for options, message in (
        ({"val": 2}, "--data.val 2 must be a share"),
        ({"max_length": 300}, "--data.batch_tokens 140 must be at least --data.max_length 300"),
    ):
        with pytest.raises(ValueError, match=message):
            module_of(tmp_path, target, **options)
    with pytest.raises(ValueError, match="names no file"):
        read([], target)
    one = write_jsonl(tmp_path / "one.jsonl", [{"messages": chat("a", "b")}])
    with pytest.raises(ValueError, match="hold one prompt, so no prompt can be held out"):
        read(one, target)
    (tmp_path / "target" / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="its tokenizer cannot be loaded"):
        read(one, target)
