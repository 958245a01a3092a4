"""Formats of rows and files, and what bad ones get."""

import gzip
import json
import logging
import os
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from drafter.data import reading
from drafter.data.formats import read_rows, read_traffic
from drafter.data.reading import digest_of_rows, read_records
from drafter.utils import parse
from tests.data.tiny import chat, write_jsonl

SAME_CONVERSATION = [
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "Why?"}]}, *chat("", "Because.")[1:]]},
    {"conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "Because."}]},
    *({"prompt": "Why?", key: "Because."} for key in ("completion", "response", "text")),
]


@pytest.mark.parametrize("fields", SAME_CONVERSATION, ids=lambda fields: "-".join(fields))
def test_every_format_becomes_the_same_messages(tmp_path: Path, fields: dict) -> None:
    (row,) = read_rows(write_jsonl(tmp_path / "a.jsonl", [fields]))
    assert list(row.messages) == chat("Why?", "Because.")
    assert row.text is None and not row.is_cut and row.where == f"{tmp_path}/a.jsonl, line 1"


def test_of_mt_bench_rows_the_first_turn_is_the_prompt(tmp_path: Path) -> None:
    asked = {"question_id": 81, "category": "writing", "turns": ["Write.", "Rewrite."]}
    (row,) = read_rows(write_jsonl(tmp_path / "a.jsonl", [asked]))
    assert list(row.messages) == chat("Write.") and row.id == "81"


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".json.gz", ".parquet"])
def test_every_kind_of_file_gives_the_same_rows(tmp_path: Path, suffix: str) -> None:
    rows = [{"messages": chat("Grüße?", "Ja\u2028nein\x85."), "id": "x"}, {"messages": chat("b", "c"), "id": "y"}]
    path = tmp_path / f"rows{suffix}"
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_bytes(gzip.compress(("\n".join(lines) if "jsonl" in suffix else f"[{','.join(lines)}]").encode()))
    if suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    read = list(read_rows(path))
    assert [list(row.messages) for row in read] == [row["messages"] for row in rows]
    assert [row.id for row in read] == ["x", "y"]


def test_csv_rows_are_text(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('prompt,completion\n"What, really?","two\nlines"\nNA,So.\n')
    rows = [[turn["content"] for turn in row.messages] for row in read_rows(path)]
    assert rows == [["What, really?", "two\nlines"], ["NA", "So."]]


def test_jsonl_ends_lines_at_the_line_feed_only(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes('\ufeff{"text": "a\u2028b\u2029c\x85d"}\r\n\n{"text": "e"}'.encode())
    records = list(read_records(path))
    assert [record.fields["text"] for record in records] == ["a\u2028b\u2029c\x85d", "e"]
    assert [record.where for record in records] == [f"{path}, line {number}" for number in (1, 3)]


def test_columns_rename_keys(tmp_path: Path) -> None:
    name = write_jsonl(tmp_path / "a.jsonl", [{"messages": chat("a"), "question": "Why?", "reply": "So.", "uid": 7}])
    (row,) = read_rows(name, columns={"prompt": "question", "completion": "reply"})
    assert list(row.messages) == chat("Why?", "So."), "a named column wins over other keys"
    (row,) = read_rows(name, columns={"id": "uid"})
    assert row.id == "7" and list(row.messages) == chat("a")
    with pytest.raises(ValueError, match=r"line 1: --column prompt=q: the row has no key 'q'"):
        list(read_rows(name, columns={"prompt": "q"}))


BAD_ROWS = [
    ({"foo": 1}, r"no known keys \(the row has 'foo'\)"),
    (["text"], "must be an object with keys, not list"),
    ({"messages": [*chat("a", "b"), *chat("", "c")[1:]]}, r"turns out of order \(user, assistant, assistant\)"),
    ({"messages": [{"role": "system", "content": "a"}]}, "no user turn"),
    ({"messages": [{"role": ["x"], "content": "a"}]}, r"messages.0: the role is \['x'\]; known are system"),
    ({"messages": [{"role": "user", "content": None}]}, "messages.0.content: Input should be a valid string"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "of type 'image_url': only text can be"),
    ({"messages": ["hello"]}, "messages.0: Input should be a valid dictionary"),
    ({"prompt": " "}, "the text is empty"),
    ({"text": "\ud800"}, "broken JSON .unexpected end of hex escape"),
    ({"prompt": "a", "tools": 3}, "tools: Input should be a valid tuple"),
]


@pytest.mark.parametrize(("row", "message"), BAD_ROWS, ids=lambda value: str(value)[:40])
def test_bad_rows_are_named_by_line(tmp_path: Path, row: object, message: str) -> None:
    name = write_jsonl(tmp_path / "a.jsonl", [{"text": "fine"}, row])
    with pytest.raises(ValueError, match=rf"a\.jsonl, line 2.*{message}"):
        list(read_rows(name))


BAD_FILES = {
    "blank.jsonl": (b"\n \n", "holds no rows"),
    "empty.json": (b"[]", "holds no rows"),
    "text.json": (b'"abc"', "text.json, row 1: broken JSON"),
    "more.json": (b'[{"text": "a"}] b', "more.json, row 2: broken JSON"),
    "torn.json": (b'[{"text": "a"}, {"text": "b"', "torn.json, row 2: broken JSON"),
    "deep.json": (b"[" * 100_000, "deep.json, row 1: broken JSON"),
    "torn.jsonl": (b'{"text": "a"}\n{"text": "b', "line 2: broken JSON"),
    "latin.jsonl": (b'{"text": "\xe9"}\n', "line 1: the text is not UTF-8"),
    "latin.csv": (b"prompt\n\xe9\n", "latin.csv.*: the text is not UTF-8"),
    "utf16.jsonl": ("{}".encode("utf-16"), "line 1: the text is not UTF-8"),
    "utf16.json": ("[{}]".encode("utf-16-le"), "row 1: the text is not UTF-8"),
    "torn.jsonl.gz": (gzip.compress(b'{"text": "a"}\n' * 1000)[:-20], "damaged gzip"),
    "no.json.gz": (b"[]", "no.json.gz: damaged gzip file .Not a gzipped file"),
    "no.parquet": (b"PAR1", "no.parquet: the file cannot be read .Parquet"),
    "table.tsv": (b"a,b\n", "unknown kind of file"),
    "long.csv": (b"prompt,completion\na,b\na,b,c\n", "long.csv, line 3: the file cannot be read .more values"),
    "names.csv": (b"prompt\n", "holds no rows"),
    "long.jsonl": (b'{"prompt": "a"}\n{"prompt": "' + b"a" * (1 << 20) + b'"}\n', "line 2: longer than 1 MiB"),
    "bomb.jsonl.gz": (gzip.compress(b" " * (2 << 20)), "line 1: longer"),
    "blank.jsonl.gz": (gzip.compress(b"\n" * (2 << 20)), "line 1048577: longer"),
    "bomb.json.gz": (gzip.compress(b'[{"prompt": "' + b"a" * (3 << 20)), "row 1: longer"),
    "blank.json.gz": (gzip.compress(b'{"prompt": "a"}' + b" " * (3 << 20)), "row 2: longer"),
    "wide.csv": (b"a," * 100_000 + b"\nb\n", "wide.csv: 100,001 columns are more than 1,000"),
    "bomb.csv": (b'prompt\n"' + b"a\n" * (1 << 20), "bomb.csv, line .*field larger than field limit"),
    "deep.jsonl": (b'{"prompt": "a", "more": ' + b"[" * 500 + b"]" * 500 + b"}\n", "line 1: broken JSON .recursion"),
}


def test_bad_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parse, "MAX_LINE_MIB", 1)
    for name, (data, message) in BAD_FILES.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ValueError, match=message):
            list(read_rows(tmp_path / name))
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        list(read_rows(tmp_path / "missing.jsonl"))
    with pytest.raises(ValueError, match="is a folder"):
        list(read_rows(tmp_path))
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(ValueError, match="no regular file"):
        list(read_rows(tmp_path / "pipe.jsonl"))
    dates = pyarrow.array([10**18], pyarrow.timestamp("us"))  # of the year 33,658
    parquet.write_table(pyarrow.table({"text": ["a"], "date": dates}), tmp_path / "late.parquet")
    with pytest.raises(ValueError, match=r"late.parquet: the file cannot be read"):
        list(read_rows(tmp_path / "late.parquet"))


def test_parquet_is_read_a_few_rows_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dictionary and run lengths pack any number of long values into a few bytes."""
    path, most = tmp_path / "bomb.parquet", 32 << 20
    same = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 600, pyarrow.int32()), ["a" * (1 << 20)])
    parquet.write_table(pyarrow.table({"text": same}), path, compression="zstd")
    assert path.stat().st_size < 10_000
    before = pyarrow.total_allocated_bytes()
    for number, row in enumerate(read_records(path), start=1):
        assert row.where == f"{path}, row {number}" and pyarrow.total_allocated_bytes() - before < most
    assert number == 600
    parquet.write_table(pyarrow.table({"text": ["a", "a" * (40 << 20)]}), path)
    with pytest.raises(ValueError, match="a row after row 0 is longer than 16 MiB"):
        list(read_records(path))
    monkeypatch.setattr(reading, "_MOST_VALUES", 1000)
    parquet.write_table(pyarrow.table({"token_ids": [[7] * 1001]}), path)
    with pytest.raises(ValueError, match="values in a row group: write smaller row groups"):
        list(read_records(path))


def test_a_hub_name_that_is_a_folder_here_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own" / "er").mkdir(parents=True)
    with pytest.raises(ValueError, match="own/er is a folder here"):
        list(read_rows("own/er:train"))


def test_files_of_the_hub_have_the_limits_of_all_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    builder, files = datasets.load_dataset_builder, tmp_path / "data"

    def load(name: str) -> datasets.DatasetBuilder:
        assert not logging.getLogger("huggingface_hub.utils._http").isEnabledFor(logging.WARNING), "retries"
        if name == "owner/none":
            raise ConnectionError("offline\nvery")
        return builder(str(tmp_path))

    monkeypatch.setattr(datasets, "load_dataset_builder", load)
    with pytest.raises(ValueError, match=r"owner/none: the data set cannot be loaded from the hub .offline.$"):
        list(read_rows("owner/none"))
    files.mkdir()
    (files / "train.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "Why?"}'))
    (files / "test.json").write_bytes(b'[{"prompt": "How?"}, {"prompt": "' + b"a" * (2 << 20) + b'"}]')
    assert [row.where for row in read_rows("owner/name")] == ["owner/name, train.jsonl.gz, line 1"]
    with pytest.raises(ValueError, match=r"owner/name:dev: .* .no split dev: it has train, test"):
        list(read_rows("owner/name:dev"))
    before = digest_of_rows("owner/name:test")
    assert before == digest_of_rows("owner/name:test") != digest_of_rows("owner/name")
    monkeypatch.setattr(parse, "MAX_LINE_MIB", 1)
    with pytest.raises(ValueError, match=r"^owner/name:test, test.json, row 2: longer than"):
        list(read_rows("owner/name:test"))


# -- recorded traffic ----------------------------------------------------------------------------------------------


def answer(*ids: int) -> dict:
    return {"prompt_token_ids": list(ids[:2]), "token_ids": list(ids[2:]), "temperature": 0.5}


def test_files_that_a_server_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_jsonl(tmp_path / "traffic-2.jsonl", [answer(1, 2, 3), answer(4, 5, 6), answer(1, 2, 3)])
    with (tmp_path / "traffic-2.jsonl").open("a") as stream:
        stream.write('{"prompt_token_ids": [9], "token_')
    reply = {"prompt_token_ids": [7, 7], "choices": [{"token_ids": [8]}], "model": "of vLLM"}
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(json.dumps(reply).encode() + b"\n"))
    (tmp_path / "gone.jsonl").symlink_to(tmp_path / "nowhere")  # as a file that rotation removed
    (tmp_path / "notes.txt").write_text("no traffic")
    rows = read_traffic(tmp_path, vocab_size=9)
    assert [(*item.prompt_token_ids, *item.token_ids) for item in rows] == [(7, 7, 8), (1, 2, 3), (4, 5, 6)]
    assert "traffic-2.jsonl, line 4: left out, as the line is not written" in capsys.readouterr().err
    assert read_traffic(tmp_path / "traffic-2.jsonl") == rows[1:]


def test_what_is_no_traffic(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no recorded answers"):
        read_traffic(tmp_path)
    with pytest.raises(FileNotFoundError):
        read_traffic(tmp_path / "none.jsonl")
    for fields, message in (
        ({"prompt_token_ids": [1, 9], "token_ids": [1]}, "line 1: token id 9 is outside .* of 9 tokens"),
        ({"prompt_token_ids": [1], "token_ids": [-1]}, "line 1: token_ids.0: Input should be greater"),
        ({"prompt_token_ids": [1], "choices": [{}]}, "line 1 lacks token_ids"),
    ):
        write_jsonl(tmp_path / "a.jsonl", [fields])
        with pytest.raises(ValueError, match=f"a.jsonl, {message}"):
            read_traffic(tmp_path, vocab_size=9)
    os.mkfifo(tmp_path / "b.jsonl")
    with pytest.raises(ValueError, match="b.jsonl is no regular file"):
        read_traffic(tmp_path / "b.jsonl")
