"""Results files: one JSON object a line, each with the schema's name. No torch here."""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

SCHEMA = "drafter-bench/1"
Record = dict[str, Any]

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
    path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps({"schema": SCHEMA, **record}, ensure_ascii=False) + "\n"
    with path.open("a", encoding="utf-8") as stream:
        stream.write(line)
        stream.flush()
        os.fsync(stream.fileno())


def read_records(paths: Iterable[Path]) -> list[Record]:
    """All records of results files.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a broken line, another schema, a record that lacks a key, or no records at all; with file and line.
    """
    records = []
    for path in paths:
        lines = path.read_text(encoding="utf-8").split("\n")  # a line separator within a string is no line's end
        records += [_parse(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
        if not any(line.strip() for line in lines):
            raise ValueError(f"{path} holds no results")
    return records


def resume_records(path: Path) -> list[Record]:
    """What an earlier, perhaps interrupted, run left in a results file; a last line cut in the middle is removed."""
    if not path.exists():
        return []
    data = path.read_bytes()
    whole, newline, rest = data.rpartition(b"\n")
    if rest.strip():
        # The writer died within a line: only whole lines are results.
        with path.open("rb+") as stream:
            stream.truncate(len(whole) + len(newline))
    return read_records([path]) if whole.strip() else []


def _parse(line: str, where: str) -> Record:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: broken JSON ({error.msg}, column {error.colno})") from error
    schema = record.get("schema") if isinstance(record, dict) else None
    if schema != SCHEMA:
        raise ValueError(f"{where}: not a benchmark result of schema {SCHEMA!r} but of {schema!r}")
    kind = record.get("kind")
    if kind not in _KEYS:
        raise ValueError(f"{where}: kind is {kind!r} but must be one of {', '.join(_KEYS)}")
    missing = [key for key in _KEYS[kind] if key not in record]
    if missing:
        raise ValueError(f"{where}: the record lacks {', '.join(missing)}")
    return record
