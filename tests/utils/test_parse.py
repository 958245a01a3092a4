"""Hostile files end in one line that names the file, soon and in little memory."""

import os
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from drafter.data.formats import Row
from drafter.engine.tuned import RowPlan, TunedSizes
from drafter.utils.parse import parse_json, parse_yaml, read_json, read_json_object, read_yaml, validated


@pytest.mark.parametrize(
    ("read", "text", "words"),
    [
        (read_json, "[" * 100_000, "recursion limit"),
        (read_json, "1" * 5000, "out of range"),
        (read_json, '"\\ud800"', "hex escape"),
        (read_json_object, "[1]", "must be a JSON object"),
        (read_yaml, "a: &a [*a]", "alias"),
        (read_yaml, "[" * 5000, "nested too deep"),
        (read_yaml, "a: 1" + "0" * 400, "beyond the limit"),
        (read_yaml, "a: !!python/object/apply:os.system [ls]", "broken YAML"),
        (read_yaml, "a: " + "9" * 5000, "broken YAML"),
    ],
)
def test_files_beyond_the_limits(read: Any, text: str, words: str, tmp_path: Path) -> None:
    start, file = time.monotonic(), tmp_path / "config"
    file.write_text(text)
    with pytest.raises(ValueError, match=words) as found:
        read(file)
    assert str(found.value).startswith(str(file)) and "\n" not in str(found.value)
    assert time.monotonic() - start < 10


def test_other_bytes_and_other_files(tmp_path: Path) -> None:
    for read in (read_json, read_yaml):
        (tmp_path / "latin").write_bytes(b'{"a": "\xff"}')
        with pytest.raises(ValueError, match="latin: (broken YAML|the text is not UTF-8)"):
            read(tmp_path / "latin")
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        with pytest.raises(ValueError, match="no regular file"):
            read_json(place)
    with (tmp_path / "large").open("wb") as stream:
        stream.truncate(1 << 40)
    for read in (read_json, read_yaml):
        with pytest.raises(ValueError, match="larger than"):
            read(tmp_path / "large")
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "none")


@pytest.mark.parametrize(
    ("kind", "name"),
    [(TunedSizes, "plans"), (RowPlan, "choices"), (Row, "messages"), (Row, "tools"), (Row, "token_ids")],
)
def test_a_list_ends_at_its_first_fault(kind: Any, name: str) -> None:
    """A fault takes a kilobyte, so that the faults of a list of millions would take gigabytes and minutes."""
    with pytest.raises(ValueError, match="here") as caught:
        validated(kind, {name: ["a"] * 3}, "here")
    assert isinstance(caught.value.__cause__, ValidationError)
    assert len([fault for fault in caught.value.__cause__.errors() if fault["loc"][0] == name]) < 3


def test_what_is_within_the_limits_is_read() -> None:
    assert parse_json(b'\xef\xbb\xbf{"a": 18446744073709551616}', "here") == {"a": 2**64}
    assert parse_yaml("a: &name {b: [1, 2]}", "here") == {"a": {"b": [1, 2]}}


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    for read in (lambda: parse_json(data, "here"), lambda: parse_yaml(data.decode("utf-8", "replace"), "here")):
        try:
            read()
        except ValueError as error:
            assert str(error).startswith("here")
