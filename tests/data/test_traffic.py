"""Recorded traffic: read while a server writes, and refused with file and line."""

import gzip
import json
import os
from pathlib import Path

import pytest

from drafter.data.formats import read_traffic
from tests.data.tiny import write_jsonl


def row(*ids: int) -> dict:
    return {"prompt_token_ids": list(ids[:2]), "token_ids": list(ids[2:]), "temperature": 0.5}


def test_files_that_a_server_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_jsonl(tmp_path / "traffic-2.jsonl", [row(1, 2, 3), row(4, 5, 6), row(1, 2, 3)])
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
