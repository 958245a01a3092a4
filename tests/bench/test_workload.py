"""Prompt sets: files of every known form, names of the hub, conversations and categories."""

from pathlib import Path

import datasets
import pytest

from drafter.bench.workload import Item, Workload, read_prompt_set
from tests.data.tiny import write_jsonl


def asked(text: str) -> tuple[dict[str, str], ...]:
    return ({"role": "user", "content": text},)


def test_rows_of_every_form_become_prompts(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "be brief"}, *asked("why"), {"role": "assistant", "content": "so"}]
    rows = [
        {"category": "math", "turns": ["one", "two"]},
        {"prompt": "hello", "completion": "unused"},
        {"messages": [*chat, *asked("and")]},
        {"text": "once upon"},
        {"prompt_token_ids": [5, 6], "token_ids": [7]},
    ]
    workload = read_prompt_set(write_jsonl(tmp_path / "mine.jsonl", rows))
    assert workload.name == "mine" and workload.categories == ["math"]
    assert len({Workload("w", (item,)).digest for item in (*workload.items, Item("", asked("one")))}) == 6
    assert workload.items[0] == Item("math", asked("one")) and workload.items[1] == Item("", asked("hello"))
    assert workload.items[2].prompt == (*chat, *asked("and"))
    assert workload.items[3:] == (Item("", "once upon"), Item("", (5, 6)))


@pytest.mark.parametrize("row", [{"turns": ["", "two"]}, {"prompt": "x", "category": 3}])
def test_bad_rows_are_refused_with_their_place(tmp_path: Path, row: dict[str, object]) -> None:
    path = write_jsonl(tmp_path / "bad.jsonl", [{"prompt": "fine"}, row])
    with pytest.raises(ValueError, match="bad.jsonl, line 2"):
        read_prompt_set(path)


def test_fewer_prompts_come_from_all_categories() -> None:
    items = tuple(Item(category, str(i)) for i, category in enumerate("aaabb"))
    workload = Workload("w", items)
    assert [item.prompt for item in workload.take(3).items] == ["0", "1", "3"]
    assert [item.prompt for item in workload.take(4).items] == ["0", "1", "3", "4"]
    assert workload.take(None) == workload == workload.take(9)


@pytest.mark.parametrize(
    ("name", "row", "item"),
    [
        ("mtbench", {"prompt": ["one", "two"], "category": "writing"}, Item("writing", asked("one"))),
        ("gsm8k", {"question": "How many?", "answer": "4"}, Item("math", asked("How many?"))),
    ],
)
def test_named_sets_are_read_by_their_own_columns(name: str, row: dict[str, object], item: Item, monkeypatch) -> None:
    monkeypatch.setattr(datasets, "load_dataset", lambda *words, **options: [row])
    assert read_prompt_set(name) == Workload(name, (item,))

    def load_dataset(*words: object, **options: object) -> None:
        raise ConnectionError("no route to the hub\nand more")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(ValueError, match=rf"--prompts {name}: the data set cannot be loaded from the hub \(.*no route"):
        read_prompt_set(name)


def test_the_packages_own_prompts_have_names_and_need_no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.socket.connect", lambda *words: pytest.fail("the network is asked"))
    own = [item.prompt for item in read_prompt_set("default").items]
    texts = {turns[0]["content"] for turns in own}
    assert len(texts) == len(own) >= 100 and all(len(turns) == 1 for turns in own)
    evaluation = read_prompt_set("evaluation")
    assert evaluation.name == "evaluation" and len(evaluation.items) == 20
    assert len(evaluation.categories) == 10 and len(evaluation.take(10).categories) == 10
    assert not texts & {item.prompt[-1]["content"] for item in evaluation.items}, "calibrated on"
