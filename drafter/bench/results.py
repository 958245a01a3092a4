"""Results files: one JSON object a line, of a run. Imports no torch."""
# ruff: noqa: UP013  # a record is easier to read in a few lines than in a class of many

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, NotRequired

from pydantic import Field, FiniteFloat
from typing_extensions import TypedDict

from drafter.data.reading import read_json_lines, without_null
from drafter.utils.io import append, is_stream
from drafter.utils.parse import MAX_INTEGER, validated

SCHEMA = "drafter-bench/1"
BenchRecord = dict[str, Any]
_BEGINNING = json.dumps({"schema": SCHEMA})[:-1].encode()  # of every line that :func:`append_result` writes

_Int = Annotated[int, Field(ge=-MAX_INTEGER, le=MAX_INTEGER)]  # larger ones do not divide
# The fields of records without null that tables read.
_Machine = TypedDict("_Machine", {
    "device": NotRequired[str], "cpu": NotRequired[str], "system": str, "num_cpus": _Int,
    "memory_gib": NotRequired[FiniteFloat],
})  # fmt: skip
_Target = TypedDict("_Target", {"name": str, "dtype": str, "num_parameters": _Int})
_Prompts = TypedDict("_Prompts", {"name": str, "digest": str, "num_prompts": _Int})
_Category = TypedDict("_Category", {"seconds": NotRequired[FiniteFloat], "num_tokens": _Int})
_Memory = TypedDict("_Memory", {"bytes": _Int})
_Identical = TypedDict("_Identical", {"num_prompts": _Int, "num_identical": _Int})
_Run = TypedDict("_Run", {
    "run_id": str, "round": _Int, "method": str, "build": NotRequired[str], "batch_size": _Int,
    "temperature": FiniteFloat, "max_new_tokens": _Int, "seed": NotRequired[_Int], "device": str,
    "drafter": NotRequired[str], "drafter_fingerprint": NotRequired[str],
    "tuned_digest": NotRequired[str], "target": _Target, "prompts": _Prompts, "seconds": FiniteFloat,
    "num_tokens": _Int, "num_forwards": _Int, "by_category": dict[str, _Category], "peak_memory_bytes": _Memory,
    "identical": NotRequired[_Identical], "machine": _Machine, "versions": dict[str, str],
    "git_revision": NotRequired[str], "date": str,
})  # fmt: skip


def run_id(identity: Mapping[str, Any]) -> str:
    """Sixteen hex digits over the settings of a run. A run whose id the file holds is not repeated."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()[:16]


def append_result(path: Path, record: BenchRecord) -> None:
    """Add a line to a results file, complete on disk before this returns."""
    append(path, json.dumps({"schema": SCHEMA, **record}, ensure_ascii=False) + "\n")


def read_results(paths: Iterable[Path]) -> list[BenchRecord]:
    """All records of results files, without null.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a broken line, another schema, a record that lacks a key, or no records at all; with file and line.
    """
    found = [(path, _records_of(path)) for path in paths]
    if empty := [path for path, records in found if not records]:
        raise ValueError(f"{empty[0]} holds no results")
    return [record for _, records in found for record in records]


def resume_results(path: Path) -> list[BenchRecord]:
    """The records of a results file, which is then ready for more lines: a last line without a line feed, left by an
    interrupted run, is removed. ValueError for other lines (see :func:`read_results`); the file stays unchanged.
    """
    if not path.exists() or is_stream(path):
        return []
    records = _records_of(path, skip_torn=True)  # before any change: a file of another kind stays unchanged
    whole, newline, rest = path.read_bytes().rpartition(b"\n")
    if rest.strip() and not (rest.startswith(_BEGINNING) or _BEGINNING.startswith(rest)):
        raise ValueError(
            f"{path}: the last line has no line feed and is not the beginning of a benchmark result of schema "
            f"{SCHEMA!r}: give another file, or remove that line"
        )
    os.truncate(path, len(whole) + len(newline))
    return records


def _records_of(path: Path, *, skip_torn: bool = False) -> list[BenchRecord]:
    records = []
    for fields, where in read_json_lines(path, str(path), skip_torn=skip_torn):
        if fields.get("schema") != SCHEMA:
            raise ValueError(f"{where}: not a benchmark result of schema {SCHEMA!r} but of {fields.get('schema')!r}")
        records.append(without_null(fields))
        validated(_Run, records[-1], where, strict=True)
    return records
