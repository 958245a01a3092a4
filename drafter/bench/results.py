"""Results files: one JSON object a line, of a run or of a level of load. Imports no torch."""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from drafter.data.reading import read_json_lines, without_null
from drafter.utils.io import append, is_stream
from drafter.utils.parse import check_shape

SCHEMA = "drafter-bench/1"
BenchRecord = dict[str, Any]
_BEGINNING = json.dumps({"schema": SCHEMA})[:-1].encode()  # of every line that :func:`append_result` writes

_SPREAD = {"median": float, "p95": float, "p99": float}
_MADE_BY = {
    "machine": {"device?": str, "cpu?": str, "system": str, "num_cpus": int, "memory_gib?": float},
    "versions": {"*": str},
    "git_revision?": str,
    "date": str,
}
# The shapes of records without null, by kind, as :func:`drafter.utils.parse.check_shape` reads shapes.
_SHAPES: dict[str, dict[str, Any]] = {
    "run": {
        "run_id": str, "round": int, "method": str, "build?": str, "batch_size": int,
        "temperature": float, "max_new_tokens": int, "seed?": int, "device": str,
        "compile?": bool, "drafter?": str, "drafter_fingerprint?": str, "tuned_digest?": str,
        "target": {"name": str, "dtype": str, "num_parameters": int},
        "prompts": {"name": str, "digest": str, "num_prompts": int},
        "seconds": float, "num_tokens": int, "num_forwards": int, "acceptance?": [int],
        "by_category": {"*": {"seconds?": float, "num_tokens": int}},
        "peak_memory_bytes": {"bytes": int},
        "identical?": {"num_prompts": int, "num_identical": int, "margins": [float]}, **_MADE_BY,
    },
    "load": {
        "url": str, "model": str, "prompts": {"name": str}, "concurrency?": int, "rate?": float,
        "seconds": float, "num_requests": int, "num_failed": int, "num_tokens": int,
        "first_token_seconds": _SPREAD, "token_seconds": _SPREAD, "latency_seconds": _SPREAD, **_MADE_BY,
    },
}  # fmt: skip


def run_id(identity: Mapping[str, Any]) -> str:
    """Id of a run: sixteen hex digits over its settings. A run whose id the file holds is not repeated."""
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
    records = []
    for path in paths:
        found = _records_of(path)
        if not found:
            raise ValueError(f"{path} holds no results")
        records += found
    return records


def resume_results(path: Path) -> list[BenchRecord]:
    """The records of a results file, which is then ready for more lines.

    A last line without a line feed, left by an interrupted run, is removed: the run is made again.

    Raises:
        ValueError: the file holds other lines (see :func:`read_results`); the file stays unchanged.
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
        shape = _SHAPES.get(str(fields.get("kind")))
        if shape is None:
            raise ValueError(f"{where}: kind is {fields.get('kind')!r} but must be one of {', '.join(_SHAPES)}")
        records.append(without_null(fields))
        check_shape(records[-1], shape, f"{where}: the record")
    return records


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, and 95th and 99th percentile by nearest rank, as records hold them; zeros of no values.

    Of 1, 2, 3, 4 the median is 2.5 and the 95th percentile 4.
    """
    import numpy

    p95, p99 = numpy.quantile(values or [0.0], (0.95, 0.99), method="inverted_cdf").tolist()
    return {"median": round(median(values or [0.0]), 6), "p95": round(p95, 6), "p99": round(p99, 6)}
