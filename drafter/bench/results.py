"""Results files: one JSON object a line, of a run or of a level of load. Imports no torch."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from drafter.utils.io import append, is_stream
from drafter.utils.parse import check_shape, parse_json

SCHEMA = "drafter-bench/1"
BenchRecord = dict[str, Any]
_BEGINNING = json.dumps({"schema": SCHEMA})[:-1].encode()  # of every line that :func:`append_result` writes

_SPREAD = {"median": float, "p95": float, "p99": float}
_MADE_BY = {
    "machine": {
        "device?": (str, None), "cpu?": (str, None), "system": str, "num_cpus": int, "memory_gib?": (float, None),
    },
    "versions": {"*": str},
    "git_revision?": (str, None),
    "date": str,
}  # fmt: skip
# The shapes of records, by kind, as :func:`drafter.utils.parse.check_shape` reads shapes.
_SHAPES: dict[str, dict[str, Any]] = {
    "run": {
        "run_id": str, "round": int, "method": str, "build?": str, "batch_size": int,
        "temperature": float, "max_new_tokens": int, "seed?": (int, None), "device": str,
        "compile?": (bool, None), "drafter?": (str, None), "drafter_fingerprint?": (str, None),
        "tuned_digest?": (str, None),
        "target": {"name": str, "dtype": str, "num_parameters": int},
        "prompts": {"name": str, "digest": str, "num_prompts": int},
        "seconds": float, "num_tokens": int, "num_forwards": (int, None), "acceptance": ([int], None),
        "by_category": {"*": {"seconds": (float, None), "num_tokens": int, "num_forwards": (int, None)}},
        "peak_memory_bytes": {"bytes": int},
        "identical": ({"num_prompts": int, "num_identical": int, "margins": [float]}, None), **_MADE_BY,
    },
    "load": {
        "url": str, "model": str, "prompts": {"name": str}, "concurrency": (int, None),
        "rate": (float, None), "seconds": float, "num_requests": int, "num_failed": int, "num_tokens": int,
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


def resume_results(path: Path) -> list[BenchRecord]:
    """The records of a results file, which is then ready for more lines.

    A last line without a line feed, left by an interrupted run, is removed: the run is made again.

    Raises:
        ValueError: the file holds other lines (see :func:`read_results`); the file stays unchanged.
    """
    if not path.exists() or is_stream(path):
        return []
    whole, newline, rest = path.read_bytes().rpartition(b"\n")
    records = _parse_lines(whole, path)  # before any change: a file of another kind stays unchanged
    if not rest.strip():
        return records
    if not (rest.startswith(_BEGINNING) or _BEGINNING.startswith(rest)):
        raise ValueError(
            f"{path}: the last line has no line feed and is not the beginning of a benchmark result of schema "
            f"{SCHEMA!r}: give another file, or remove that line"
        )
    with path.open("rb+") as stream:
        stream.truncate(len(whole) + len(newline))
    return records


def _parse_lines(data: bytes, path: Path) -> list[BenchRecord]:
    """The records of a file's bytes."""
    try:
        lines = data.decode().split("\n")  # a line separator within a string is no line's end
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error.reason}, byte {error.start})") from error
    records = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        record = parse_json(line.encode(), where)
        schema = record.get("schema") if isinstance(record, dict) else None
        if schema != SCHEMA:
            raise ValueError(f"{where}: not a benchmark result of schema {SCHEMA!r} but of {schema!r}")
        shape = _SHAPES.get(str(record.get("kind")))
        if shape is None:
            raise ValueError(f"{where}: kind is {record.get('kind')!r} but must be one of {', '.join(_SHAPES)}")
        check_shape(record, shape, f"{where}: the record")
        records.append(record)
    return records


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, and 95th and 99th percentile by nearest rank, as records hold them; zeros of no values.

    Of 1, 2, 3, 4 the median is 2.5 and the 95th percentile 4.
    """
    import numpy

    p95, p99 = numpy.quantile(values or [0.0], (0.95, 0.99), method="inverted_cdf").tolist()
    return {"median": round(median(values or [0.0]), 6), "p95": round(p95, 6), "p99": round(p99, 6)}
