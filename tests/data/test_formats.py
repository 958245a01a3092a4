"""Formats of rows and files, and what bad ones get."""

import gzip
import json
import logging
import os
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from drafter.data.formats import read_rows
from drafter.data.reading import read_records
from drafter.utils import parse
from tests.data.tiny import chat, write_jsonl

SAME_CONVERSATION = [
    {"messages": chat("Why?", "Because.")},
    {"conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "Because."}]},
    {"prompt": "Why?", "completion": "Because."},
    {"prompt": "Why?", "response": "Because."},
    {"prompt": "Why?", "text": "Because."},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "Why?"}]}, *chat("", "Because.")[1:]]},
]


@pytest.mark.parametrize("fields", SAME_CONVERSATION, ids=lambda fields: "-".join(fields))
def test_every_format_becomes_the_same_messages(tmp_path: Path, fields: dict) -> None:
    (row,) = read_rows(write_jsonl(tmp_path / "a.jsonl", [fields]))
    assert list(row.messages) == chat("Why?", "Because.")
    assert row.text is None and not row.is_cut and row.where == f"{tmp_path}/a.jsonl, line 1"


def test_of_mt_bench_rows_the_first_turn_is_the_prompt(tmp_path: Path) -> None:
    asked = {"question_id": 81, "category": "writing", "turns": ["Write.", "Rewrite."]}
    (row,) = read_rows(write_jsonl(tmp_path / "a.jsonl", [asked]))
    assert list(row.messages) == chat("Write.") and row.id == "81" and row.later_turns == ("Rewrite.",)


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".json", ".json.gz", ".parquet"])
def test_every_kind_of_file_gives_the_same_rows(tmp_path: Path, suffix: str) -> None:
    rows = [
        {"messages": chat("Grüße?", "Ja\u2028nein\x85."), "source": "x"},
        {"messages": chat("b", "c"), "source": "y"},
    ]
    path = tmp_path / f"rows{suffix}"
    if suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        lines = [json.dumps(row, ensure_ascii=False) for row in rows]
        data = ("\n".join(lines) if "jsonl" in suffix else f"[{','.join(lines)}]").encode()
        path.write_bytes(gzip.compress(data) if suffix.endswith(".gz") else data)
    read = list(read_rows(path))
    assert [list(row.messages) for row in read] == [row["messages"] for row in rows]
    assert [row.source for row in read] == ["x", "y"]


def test_csv_rows_are_text(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('prompt,completion\n"What, really?","two\nlines"\nNA,So.\n')
    rows = [[turn["content"] for turn in row.messages] for row in read_rows(path)]
    assert rows == [["What, really?", "two\nlines"], ["NA", "So."]]
    path.write_text("prompt,completion\na,b\na,b,c\n")
    with pytest.raises(ValueError, match=r"a.csv: the file cannot be read .*line 3"):
        list(read_rows(path))


def test_jsonl_ends_lines_at_the_line_feed_only(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes('\ufeff{"text": "a\u2028b\u2029c\x85d"}\r\n\n{"text": "e"}'.encode())
    records = list(read_records(path))
    assert [record.fields["text"] for record in records] == ["a\u2028b\u2029c\x85d", "e"]
    assert [record.where for record in records] == [f"{path}, line {number}" for number in (1, 3)]


def test_columns_rename_keys(tmp_path: Path) -> None:
    name = write_jsonl(tmp_path / "a.jsonl", [{"question": "Why?", "reply": "So."}])
    (row,) = read_rows(name, columns={"prompt": "question", "completion": "reply"})
    assert list(row.messages) == chat("Why?", "So.")
    with pytest.raises(ValueError, match=r"line 1: --column prompt=q: the row has no key 'q'"):
        list(read_rows(name, columns={"prompt": "q"}))
    name = write_jsonl(tmp_path / "b.jsonl", [{"messages": chat("a"), "q": "Why?"}])
    (row,) = read_rows(name, columns={"prompt": "q"})
    assert list(row.messages) == chat("Why?"), "a named column wins over other keys"


BAD_ROWS = [
    ({"foo": 1}, r"no known keys \(the row has 'foo'\)"),
    (["text"], "must be an object with keys, not list"),
    (
        {"messages": [*chat("a", "b"), {"role": "assistant", "content": "c"}]},
        "turn 3 is 'assistant', expected 'user'",
    ),
    ({"messages": [{"role": "system", "content": "a"}]}, "no user turn"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages.0: the role is 'tool'"),
    ({"messages": [{"role": ["x"], "content": "a"}]}, r"the role is \['x'\]; known are system"),
    ({"messages": [{"role": "user", "content": None}]}, "messages.0.content: Input should be a valid string"),
    ({"messages": ["hello"]}, "messages.0: Input should be a valid dictionary"),
    ({"prompt": 3}, "messages.0.content: Input should be a valid string"),
    ({"prompt": " "}, "the text is empty"),
    ({"text": "\ud800"}, "text: Input should be a valid string, unable to parse"),
    ({"turns": ["a", 7]}, "later_turns.0: Input should be a valid string"),
    ({"prompt": "a", "tools": 3}, "tools: Input should be a valid tuple"),
]


@pytest.mark.parametrize(("row", "message"), BAD_ROWS, ids=lambda value: str(value)[:40])
def test_bad_rows_are_named_by_line(tmp_path: Path, row: object, message: str) -> None:
    name = write_jsonl(tmp_path / "a.jsonl", [{"text": "fine"}, row])
    with pytest.raises(ValueError, match=rf"a\.jsonl, line 2.*{message}"):
        list(read_rows(name))


def test_bad_files(tmp_path: Path) -> None:
    def refuse(name: str, data: bytes | None, error: type[Exception], message: str) -> None:
        path = tmp_path / name
        if data is not None:
            path.write_bytes(data)
        with pytest.raises(error, match=message):
            list(read_rows(path))

    refuse("missing.jsonl", None, FileNotFoundError, "there is no such file")
    refuse("empty.jsonl", b"", ValueError, "holds no rows")
    refuse("blank.jsonl", b"\n \n", ValueError, "holds no rows")
    refuse("empty.json", b"[]", ValueError, "holds no rows")
    refuse("text.json", b'"abc"', ValueError, "text.json: the file cannot be read")
    refuse("true.json", b"true", ValueError, "true.json: the file cannot be read")
    refuse("deep.json", b"[" * 100_000, ValueError, "deep.json: the file cannot be read")
    refuse("torn.jsonl", b'{"text": "a"}\n{"text": "b', ValueError, "line 2: broken JSON")
    refuse("latin.jsonl", b'{"text": "\xe9"}\n', ValueError, "line 1: not UTF-8")
    refuse("torn.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 1000)[:-20], ValueError, "damaged gzip")
    refuse("no.jsonl.gz", b'{"text": "a"}\n', ValueError, "damaged gzip")
    refuse("no.json.gz", b"[]", ValueError, "no.json.gz: the file cannot be read .Not a gzipped file")
    refuse("no.parquet", b"PAR1", ValueError, "no.parquet: the file cannot be read .Parquet")
    refuse("table.tsv", b"a,b\n", ValueError, "unknown kind of file")
    refuse("empty.csv", b"", ValueError, "empty.csv: the file cannot be read")
    refuse("names.csv", b"prompt\n", ValueError, "holds no rows")
    with pytest.raises(ValueError, match="is a folder"):
        list(read_rows(tmp_path))
    dates = pyarrow.array([10**18], pyarrow.timestamp("us"))  # of the year 33,658
    parquet.write_table(pyarrow.table({"text": ["a"], "date": dates}), tmp_path / "late.parquet")
    with pytest.raises(ValueError, match=r"late.parquet: the file cannot be read"):
        list(read_rows(tmp_path / "late.parquet"))


def test_a_hub_name_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked = []

    def load(name: str, split: str, streaming: bool, **options: object) -> list[dict]:
        asked.append((name, split, streaming))
        if name == "owner/none":
            assert not logging.getLogger("huggingface_hub.utils._http").isEnabledFor(logging.WARNING), "retries"
            raise ConnectionError("offline\nvery")
        return [{"prompt": "Why?"}]

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert [row.where for row in read_rows("owner/name:test")] == ["owner/name:test, row 1"]
    with pytest.raises(ValueError, match=r"owner/none: the data set cannot be loaded from the hub .offline.$"):
        list(read_rows("owner/none"))
    assert asked == [("owner/name", "test", True), ("owner/none", "train", True)]


def test_long_lines_pipes_and_deep_rows_are_refused_with_their_place(tmp_path: Path, monkeypatch) -> None:
    long = tmp_path / "long.jsonl"
    monkeypatch.setattr(parse, "MAX_LINE_MIB", 1)
    long.write_bytes(b'{"prompt": "a"}\n{"prompt": "' + b"a" * (1 << 20) + b'"}\n')
    with pytest.raises(ValueError, match=r"long.jsonl, line 2: longer than 1 MiB"):
        list(read_rows(long))
    with gzip.open(tmp_path / "bomb.jsonl.gz", "wb", compresslevel=1) as stream:
        stream.write(b" " * (2 << 20))
    with pytest.raises(ValueError, match=r"bomb.jsonl.gz, line 1: longer"):
        list(read_rows(tmp_path / "bomb.jsonl.gz"))
    (tmp_path / "deep.jsonl").write_text('{"prompt": "a", "more": ' + "[" * 500 + "]" * 500 + "}\n")
    with pytest.raises(ValueError, match=r"deep.jsonl, line 1: nested deeper"):
        list(read_rows(tmp_path / "deep.jsonl"))
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(ValueError, match="no regular file"):
        list(read_rows(tmp_path / "pipe.jsonl"))
