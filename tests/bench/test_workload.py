"""Prompt sets: files of every known form, names of the hub, conversations and categories."""

import json
import subprocess
import sys
from pathlib import Path

import datasets
import pytest

from drafter.bench.workload import HUB_SETS, Item, Workload, read_prompt_set


def write(path: Path, rows: list[object]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_rows_of_every_form_become_conversations(tmp_path: Path) -> None:
    rows = [
        {"id": "a", "category": "math", "prompt": "unused", "turns": ["one", "two"]},
        {"prompt": "hello", "completion": "unused"},
        {"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "why"},
                      {"role": "assistant", "content": "so"}, {"role": "user", "content": "and"}]},
        {"text": "once upon"},
    ]  # fmt: skip
    workload = read_prompt_set(write(tmp_path / "mine.jsonl", rows))
    assert workload.name == "mine" and workload.categories == ["math"] and workload.num_turns == 2
    assert workload.items[0] == Item("a", "math", ("one", "two"))
    assert workload.items[1] == Item("1", "", ("hello",))
    assert workload.items[2].turns == ("and",) and [m["content"] for m in workload.items[2].history] == [
        "be brief",
        "why",
        "so",
    ]
    assert workload.items[3] == Item("3", "", ("once upon",), is_raw=True)


def test_a_turn_follows_the_methods_own_answers() -> None:
    item = Item("a", "", ("one", "two"), history=({"role": "system", "content": "be brief"},))
    assert item.messages([]) == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "one"}]
    assert item.messages(["first"])[-2:] == [
        {"role": "assistant", "content": "first"},
        {"role": "user", "content": "two"},
    ]


@pytest.mark.parametrize(
    "row",
    [{"turns": []}, {"turns": "one"}, {"turns": ["one", ""]}, {"turns": ["one", 2]}, {"prompt": "x", "category": 3}],
)
def test_bad_rows_are_refused_with_their_place(tmp_path: Path, row: dict[str, object]) -> None:
    path = write(tmp_path / "bad.jsonl", [{"prompt": "fine"}, row])
    with pytest.raises(ValueError, match="bad.jsonl, line 2"):
        read_prompt_set(path)


def test_empty_and_missing_files_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(ValueError, match="empty.jsonl"):
        read_prompt_set(str(tmp_path / "empty.jsonl"))
    with pytest.raises(FileNotFoundError, match="nowhere.jsonl"):
        read_prompt_set(str(tmp_path / "nowhere.jsonl"))
    with pytest.raises(ValueError, match="nothing holds no prompts"):
        Workload("nothing", ())


def test_fewer_prompts_come_from_all_categories() -> None:
    items = tuple(Item(str(i), category, ("x",)) for i, category in enumerate("aaabb"))
    workload = Workload("w", items)
    assert [item.id for item in workload.take(3).items] == ["0", "1", "3"]
    assert [item.id for item in workload.take(4).items] == ["0", "1", "3", "4"]
    assert workload.take(None) is workload and workload.take(9) is workload


def test_conversations_can_be_broken_off() -> None:
    workload = Workload("w", (Item("0", "", ("x", "y", "z")), Item("1", "", ("x",))))
    assert [item.turns for item in workload.first_turns(2).items] == [("x", "y"), ("x",)]
    assert workload.first_turns(None) is workload and workload.first_turns(1).num_turns == 1


def test_the_digest_changes_with_what_is_asked() -> None:
    one = Workload("w", (Item("0", "a", ("x", "y")),))
    assert one.digest == Workload("other", (Item("9", "a", ("x", "y")),)).digest
    assert one.digest != Workload("w", (Item("0", "b", ("x", "y")),)).digest
    assert one.digest != Workload("w", (Item("0", "a", ("xy",)),)).digest


def test_raw_takes_single_prompts_only(tmp_path: Path) -> None:
    assert read_prompt_set(write(tmp_path / "a.jsonl", [{"prompt": "x"}]), raw=True).items[0].is_raw
    with pytest.raises(ValueError, match="--raw"):
        read_prompt_set(write(tmp_path / "b.jsonl", [{"turns": ["x", "y"]}]), raw=True)


ROWS = {
    "mtbench": {"prompt": ["one", "two"], "prompt_id": 81, "category": "writing", "reference": []},
    "humaneval": {"task_id": "HumanEval/0", "prompt": "def f():", "test": "..."},
    "gsm8k": {"question": "How many?", "answer": "4"},
}


@pytest.mark.parametrize("name", HUB_SETS)
def test_named_sets_are_read_by_their_own_columns(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "load_dataset", lambda *words, **options: [ROWS[name], ROWS[name]])
    workload = read_prompt_set(name)
    expected = {
        "mtbench": Item("81", "writing", ("one", "two")),
        "humaneval": Item("HumanEval/0", "code", ("def f():",)),
        "gsm8k": Item("0", "math", ("How many?",)),
    }
    assert workload.name == name and workload.items[0] == expected[name]


def test_a_hub_that_does_not_answer_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*words: object, **options: object) -> None:
        raise ConnectionError("no route to the hub\nand more")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(
        ValueError,
        match="--prompts gsm8k cannot be fetched .*no route to the hub; give a file of prompts, or evaluation",
    ):
        read_prompt_set("gsm8k")


def test_workloads_settings_records_and_reports_need_no_torch() -> None:
    code = (
        "import sys\n"
        "import drafter.bench.workload, drafter.cli.bench, drafter.bench.settings, drafter.bench.results\n"
        "import drafter.bench.report, drafter.bench.load\n"
        "assert not {'torch', 'matplotlib', 'datasets', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_packages_own_prompts_have_names_and_need_no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.socket.connect", lambda *words: pytest.fail("the network is asked"))
    assert len(read_prompt_set("default").items) > 20
    evaluation = read_prompt_set("evaluation")
    assert evaluation.name == "evaluation" and len(evaluation.items) == 20
    assert len(evaluation.categories) == 10 and len(evaluation.take(10).categories) == 10
    texts = {item.turns[0] for item in read_prompt_set("default").items}
    assert not texts & {item.turns[0] for item in evaluation.items}, "calibration prompts are not evaluated"
