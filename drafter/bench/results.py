"""Results files (JSON lines) and their summaries: medians over rounds, ratios over plain decoding. No torch here."""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from statistics import median
from typing import Any, NamedTuple

from drafter.bench.methods import BASELINE, NATIVE_BASELINES, PEER_BASELINE, parse_method
from drafter.engine.config import EngineConfig
from drafter.utils.io import append, is_stream
from drafter.utils.parse import check_shape, parse_json

SCHEMA = "drafter-bench/1"
BenchRecord = dict[str, Any]
_BEGINNING = json.dumps({"schema": SCHEMA})[:-1].encode()  # of every line that :func:`append_result` writes

_COUNTS = ([int], None)
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
        "run_id": str, "round": int, "method": str, "batch_size": int, "temperature": float, "max_new_tokens": int,
        "ignore_eos": bool, "seed?": (int, None), "device": str, "compile?": (bool, None), "drafter?": (str, None),
        "drafter_fingerprint?": (str, None), "tuned_digest?": (str, None),
        "target": {"name": str, "dtype": str, "num_parameters": int},
        "prompts": {"name": str, "digest": str, "num_prompts": int, "num_answers": int},
        "settings?": {"beam_width?": int, "draft_length?": int, "tree_size?": (int, None)},
        "seconds": float, "num_tokens": int, "num_forwards": (int, None), "acceptance": _COUNTS,
        "by_category": {"*": {"seconds": (float, None), "num_tokens": int, "num_forwards": (int, None)}},
        "first_token_seconds": _SPREAD, "latency_seconds": _SPREAD, "peak_memory_bytes": {"bytes": int},
        "identical": ({"num_prompts": int, "num_identical": int, "margins": [float]}, None), **_MADE_BY,
    },
    "load": {
        "run_id": str, "url": str, "model": str, "prompts": {"name": str}, "concurrency": (int, None),
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

    An incomplete last line, left by an interrupted run, is removed; a missing line feed is added.

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
    try:
        parse_json(rest, "")
    except ValueError:
        # The writer died within a line: only whole lines are results.
        with path.open("rb+") as stream:
            stream.truncate(len(whole) + len(newline))
        return records
    records += _parse_lines(rest, path, whole.count(b"\n") + len(newline) + 1)
    with path.open("ab") as stream:
        stream.write(b"\n")
    return records


def _parse_lines(data: bytes, path: Path, first: int = 1) -> list[BenchRecord]:
    """The records of a file's bytes; ``first`` is the number of the first line."""
    try:
        lines = data.decode().split("\n")  # a line separator within a string is no line's end
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error.reason}, byte {error.start})") from error
    return [_parse(line, f"{path}, line {number}") for number, line in enumerate(lines, first) if line.strip()]


def _parse(line: str, where: str) -> BenchRecord:
    record = parse_json(line.encode(), where)
    schema = record.get("schema") if isinstance(record, dict) else None
    if schema != SCHEMA:
        raise ValueError(f"{where}: not a benchmark result of schema {SCHEMA!r} but of {schema!r}")
    kind = record.get("kind")
    if not isinstance(kind, str) or kind not in _SHAPES:
        raise ValueError(f"{where}: kind is {kind!r} but must be one of {', '.join(_SHAPES)}")
    check_shape(record, _SHAPES[kind], f"{where}: the record")
    return record


# -- Statistics of one run ---


def quantile(values: Iterable[float], share: float) -> float:
    """The smallest value that ``share`` of all values do not exceed (nearest rank); 0.0 of none.

    The 0.5-quantile of 1, 2, 3, 4 is 2, the 0.95-quantile is 4.
    """
    ordered = sorted(values)
    if not ordered:
        return 0.0
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, 95th and 99th percentile, as records hold them."""
    return {
        "median": round(median(values), 6) if values else 0.0,
        "p95": round(quantile(values, 0.95), 6),
        "p99": round(quantile(values, 0.99), 6),
    }


def histogram(values: Iterable[int]) -> list[int]:
    """Entry k counts the values k: 0, 2, 2 -> [1, 0, 2]."""
    counts: list[int] = []
    for value in values:
        counts += [0] * (value + 1 - len(counts))
        counts[value] += 1
    return counts


def survival(counts: Sequence[int]) -> list[float]:
    """Share of values that are at least 1, at least 2, ...: [1, 0, 2] -> [2/3, 2/3]."""
    total = sum(counts)
    return [sum(counts[depth:]) / total for depth in range(1, len(counts))] if total else []


# -- Summaries over rounds ---


class Condition(NamedTuple):
    """The conditions that the methods of one table share.

    ``seed`` is None if all results have the same seed.
    """

    target: str
    dtype: str
    num_parameters: int
    device: str
    prompts: str
    digest: str
    num_prompts: int
    num_answers: int
    max_new_tokens: int
    ignore_eos: bool
    temperature: float
    batch_size: int
    seed: int | None

    @property
    def sampling(self) -> str:
        """How tokens are chosen, for titles."""
        kind = "greedy" if self.temperature == 0 else f"temperature {self.temperature:g}"
        return kind if self.seed is None else f"{kind}, seed {self.seed}"


class Span(NamedTuple):
    """A figure over the rounds: median, least and greatest."""

    middle: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Span":
        return cls(median(values), min(values), max(values))


class Size(NamedTuple):
    """Beam width and draft length of a drafter run, and the number of nodes of its trees."""

    beam_width: int
    draft_length: int
    tree_size: int


@dataclass(frozen=True)
class Summary:
    """The figures of one method under one condition.

    Attributes:
        label: the method, with its drafter, weights or measured sizes where results hold several.
        engine: name of the engine that decodes.
        num_rounds: number of runs.
        rate: tokens per second.
        speedup: over plain decoding of this package, round by round; None without such runs.
        speedup_over_peer: over transformers' plain `generate`, likewise.
        speedup_over_llama_cpp: over llama.cpp with BF16 weights and without speculation, likewise.
        tokens_per_step: generated tokens per target forward; None where unknown.
        survival: share of steps that accept at least 1, 2, ... draft tokens; empty where unknown.
        category_speedups: speedup over plain decoding by category (batch size 1).
        category_tokens_per_step: by category.
        num_identical: conversations identical to plain decoding, of ``num_prompts``; None where texts are not compared.
        margins: the target's logit margins where texts first differ.
        first_token_seconds: median over answers, median over rounds.
        latency_seconds: likewise, of whole answers.
        peak_bytes: highest memory of all rounds.
        size: size of the tree, for drafter with a fixed tree.
    """

    label: str
    name: str
    engine: str
    num_rounds: int
    rate: Span
    speedup: Span | None
    speedup_over_peer: Span | None
    speedup_over_llama_cpp: Span | None
    tokens_per_step: float | None
    survival: list[float]
    category_speedups: dict[str, float]
    category_tokens_per_step: dict[str, float]
    num_identical: int | None
    num_prompts: int
    margins: list[float]
    first_token_seconds: float
    latency_seconds: float
    peak_bytes: int
    size: Size | None


Tables = dict[Condition, list[Summary]]


def summarise(records: Iterable[BenchRecord]) -> Tables:
    """Summaries of all runs, conditions and methods in order of first appearance."""
    runs = [record for record in records if record["kind"] == "run"]
    labels = _labels(runs)
    has_seeds = len({record.get("seed") for record in runs}) > 1
    by_condition: dict[Condition, dict[str, list[BenchRecord]]] = {}
    for record, label in zip(runs, labels, strict=True):
        by_condition.setdefault(_condition_of(record, has_seeds), {}).setdefault(label, []).append(record)
    return {
        condition: [_summarise(label, rounds, methods) for label, rounds in methods.items()]
        for condition, methods in by_condition.items()
    }


def by_batch_size(tables: Tables) -> dict[Condition, dict[int, list[Summary]]]:
    """The tables of conditions that differ in the batch size alone. The key is the condition with batch size 0."""
    grids: dict[Condition, dict[int, list[Summary]]] = {}
    for condition, methods in tables.items():
        grids.setdefault(condition._replace(batch_size=0), {})[condition.batch_size] = methods
    return {condition: by_size for condition, by_size in grids.items() if len(by_size) > 1}


def last_part(path: str) -> str:
    """The last part of a folder's or model's name."""
    return path.rstrip("/").rpartition("/")[2]


def distinct_names(paths: Iterable[str]) -> dict[PurePosixPath, str]:
    """For every path the shortest ending that no other path has.

    Of runs/kd/drafter, runs/ce/drafter and runs/old: kd/drafter, ce/drafter and old.
    """
    distinct = {PurePosixPath(path) for path in paths}
    return {
        path: next(
            (
                str(PurePosixPath(*path.parts[-length:]))
                for length in range(1, len(path.parts))
                if not any(path.parts[-length:] == other.parts[-length:] for other in distinct - {path})
            ),
            str(path),
        )
        for path in distinct
    }


def _labels(runs: Sequence[BenchRecord]) -> list[str]:
    """A label for each run: runs of one label are rounds of one measurement."""
    names = distinct_names(record["drafter"] for record in runs if record.get("drafter"))
    weights: dict[PurePosixPath, set[str | None]] = {}
    plans: dict[tuple[PurePosixPath, str | None, str], set[str | None]] = {}
    for record in runs:
        if record.get("drafter"):
            path, fingerprint, plan = _files_of(record)
            weights.setdefault(path, set()).add(fingerprint)
            plans.setdefault((path, fingerprint, record["method"]), set()).add(plan)
    labels = []
    for record in runs:
        label = record["method"]
        if record.get("drafter"):
            path, fingerprint, plan = _files_of(record)
            notes = [names[path]] if len(names) > 1 else []
            if len(weights[path]) > 1:
                notes.append(f"weights {_short(fingerprint)}")
            if len(plans[path, fingerprint, record["method"]]) > 1:
                notes.append(f"plan {_short(plan)}")
            label += f" ({', '.join(notes)})" if notes else ""
        labels.append(label + " compiled" if record.get("compile") else label)
    return labels


def _files_of(record: BenchRecord) -> tuple[PurePosixPath, str | None, str | None]:
    """Folder of the drafter, fingerprint of its weights, digest of the measured sizes (older results lack these)."""
    path = PurePosixPath(record["drafter"])
    return path, record.get("drafter_fingerprint"), record.get("tuned_digest")


def _short(digest: str | None) -> str:
    return "unknown" if digest is None else digest[:8]


def _condition_of(record: BenchRecord, has_seeds: bool) -> Condition:
    target, prompts = record["target"], record["prompts"]
    return Condition(
        last_part(target["name"]),
        target["dtype"],
        target["num_parameters"],
        record["device"],
        prompts["name"],
        prompts["digest"],
        prompts["num_prompts"],
        prompts["num_answers"],
        record["max_new_tokens"],
        record["ignore_eos"],
        record["temperature"],
        record["batch_size"],
        record.get("seed") if has_seeds else None,
    )


def _summarise(label: str, rounds: list[BenchRecord], methods: dict[str, list[BenchRecord]]) -> Summary:
    spec = parse_method(rounds[0]["method"])
    llama_cpp = next((methods[label] for label in NATIVE_BASELINES if label in methods), [])
    is_compiled = bool(rounds[0].get("compile"))
    baseline = methods.get(BASELINE + " compiled" if is_compiled else BASELINE) or methods.get(BASELINE, [])
    identical = [record["identical"] for record in rounds if record["identical"] is not None]
    forwards = [record["num_forwards"] for record in rounds]
    num_tokens = sum(record["num_tokens"] for record in rounds)
    counts = _added([record["acceptance"] for record in rounds])
    return Summary(
        label=label,
        name=spec.name,
        engine=spec.engine,
        num_rounds=len(rounds),
        rate=Span.of([rate_of(record) for record in rounds]),
        speedup=_speedup(rounds, baseline),
        speedup_over_peer=_speedup(rounds, methods.get(PEER_BASELINE, [])),
        speedup_over_llama_cpp=_speedup(rounds, llama_cpp),
        tokens_per_step=None if None in forwards or not sum(forwards) else num_tokens / sum(forwards),
        survival=survival(counts) if counts else [],
        category_speedups=_category_speedups(rounds, baseline),
        category_tokens_per_step=_category_tokens_per_step(rounds),
        num_identical=min((item["num_identical"] for item in identical), default=None),
        num_prompts=rounds[0]["prompts"]["num_prompts"],
        margins=[margin for item in identical[:1] for margin in item["margins"]],
        first_token_seconds=median([record["first_token_seconds"]["median"] for record in rounds]),
        latency_seconds=median([record["latency_seconds"]["median"] for record in rounds]),
        peak_bytes=max(record["peak_memory_bytes"]["bytes"] for record in rounds),
        size=_size_of(rounds[0]),
    )


def rate_of(sums: Mapping[str, Any]) -> float:
    """Tokens per second; 0 where no time was taken."""
    return sums["num_tokens"] / sums["seconds"] if sums.get("seconds") else 0.0


def _speedup(rounds: list[BenchRecord], baseline: list[BenchRecord]) -> Span | None:
    """Ratios of runs of the same round: a machine that slows down does so for both."""
    slow = {record["round"]: rate_of(record) for record in baseline}
    ratios = [rate_of(record) / slow[record["round"]] for record in rounds if slow.get(record["round"])]
    return Span.of(ratios) if ratios else None


def _category_speedups(rounds: list[BenchRecord], baseline: list[BenchRecord]) -> dict[str, float]:
    slow = {record["round"]: record["by_category"] for record in baseline}
    found = {}
    for category in _common_categories(rounds):
        ratios = []
        for record in rounds:
            plain = rate_of(slow.get(record["round"], {}).get(category, {}))
            if plain and record["by_category"][category]["seconds"]:
                ratios.append(rate_of(record["by_category"][category]) / plain)
        if ratios:
            found[category] = median(ratios)
    return found


def _category_tokens_per_step(rounds: list[BenchRecord]) -> dict[str, float]:
    found = {}
    for category in _common_categories(rounds):
        sums = [record["by_category"][category] for record in rounds]
        forwards = [item["num_forwards"] for item in sums]
        if None not in forwards and sum(forwards):
            found[category] = sum(item["num_tokens"] for item in sums) / sum(forwards)
    return found


def _common_categories(rounds: list[BenchRecord]) -> list[str]:
    first, *others = (record["by_category"] for record in rounds)
    return [category for category in first if all(category in other for other in others)]


def _size_of(record: BenchRecord) -> Size | None:
    spec = parse_method(record["method"])
    if spec.name != "drafter" or spec.is_tuned or "final-beams" in spec.words:
        return None
    used = record.get("settings", {})
    tree = {name: used[name] for name in ("beam_width", "draft_length", "tree_size") if name in used}
    config = EngineConfig(**{**spec.fields, **tree})
    return Size(config.beam_width, config.draft_length, config.num_nodes)


def _added(histograms: Sequence[list[int] | None]) -> list[int]:
    known = [counts for counts in histograms if counts]
    length = max(map(len, known), default=0)
    return [sum(counts[k] for counts in known if k < len(counts)) for k in range(length)]
