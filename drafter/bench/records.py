"""Results files: one JSON object a line, each with the schema's name. No torch here."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from drafter.utils.io import append, is_stream
from drafter.utils.parse import parse_json

SCHEMA = "drafter-bench/1"
Record = dict[str, Any]
_BEGINNING = json.dumps({"schema": SCHEMA})[:-1].encode()  # of every line that :func:`append_record` writes

# What a record of each kind cannot be without.
_KEYS = {
    "run": (
        "run_id", "round", "method", "prompts", "batch_size", "temperature", "max_new_tokens", "target", "seconds",
        "num_tokens", "num_forwards", "acceptance", "by_category", "first_token_seconds", "latency_seconds",
        "peak_memory_bytes", "identical", "machine", "versions", "git_revision", "date",
    ),
    "load": (
        "run_id", "url", "model", "prompts", "concurrency", "rate", "seconds", "num_requests", "num_failed",
        "num_tokens", "first_token_seconds", "token_seconds", "latency_seconds", "machine", "versions", "date",
    ),
}  # fmt: skip


def run_id(identity: Mapping[str, Any]) -> str:
    """A name for everything that makes a run what it is; runs of the same name are not repeated."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()[:16]


def append_record(path: Path, record: Record) -> None:
    """Add a line to a results file, complete on disk before this returns."""
    append(path, json.dumps({"schema": SCHEMA, **record}, ensure_ascii=False) + "\n")


def read_records(paths: Iterable[Path]) -> list[Record]:
    """All records of results files.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a broken line, another schema, a record that lacks a key, or no records at all; with file and line.
    """
    records = []
    for path in paths:
        found = _parse_lines(path.read_bytes(), path)
        if not found:
            raise ValueError(f"{path} holds no results")
        records += found
    return records


def resume_records(path: Path) -> list[Record]:
    """What an earlier, perhaps interrupted, run left in a results file, made ready to be appended to.

    A last line of ours that was cut in the middle is removed; one that lacks its line feed only is given it.

    Raises:
        ValueError: the file holds something else, as of :func:`read_records`; it is left as it is.
    """
    if not path.exists() or is_stream(path):
        return []
    whole, newline, rest = path.read_bytes().rpartition(b"\n")
    records = _parse_lines(whole, path)  # before anything is cut: what is not ours is not ours to mend
    if not rest.strip():
        return records
    if not (rest.startswith(_BEGINNING) or _BEGINNING.startswith(rest)):
        raise ValueError(
            f"{path}: the last line has no line feed and is not the beginning of a benchmark result of schema "
            f"{SCHEMA!r}: give another file, or remove that line"
        )
    if not _is_json(rest):
        # The writer died within a line: only whole lines are results.
        with path.open("rb+") as stream:
            stream.truncate(len(whole) + len(newline))
        return records
    records += _parse_lines(rest, path, whole.count(b"\n") + len(newline) + 1)
    with path.open("ab") as stream:
        stream.write(b"\n")
    return records


def _is_json(data: bytes) -> bool:
    try:
        parse_json(data, "")
    except ValueError:
        return False
    return True


def _parse_lines(data: bytes, path: Path, first: int = 1) -> list[Record]:
    """The records of a file's bytes; ``first`` is the number of the first line."""
    try:
        lines = data.decode().split("\n")  # a line separator within a string is no line's end
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error.reason}, byte {error.start})") from error
    return [_parse(line, f"{path}, line {number}") for number, line in enumerate(lines, first) if line.strip()]


def _parse(line: str, where: str) -> Record:
    record = parse_json(line.encode(), where)
    schema = record.get("schema") if isinstance(record, dict) else None
    if schema != SCHEMA:
        raise ValueError(f"{where}: not a benchmark result of schema {SCHEMA!r} but of {schema!r}")
    kind = record.get("kind")
    if not isinstance(kind, str) or kind not in _KEYS:
        raise ValueError(f"{where}: kind is {kind!r} but must be one of {', '.join(_KEYS)}")
    missing = [key for key in _KEYS[kind] if key not in record]
    if missing:
        raise ValueError(f"{where}: the record lacks {', '.join(missing)}")
    return record
