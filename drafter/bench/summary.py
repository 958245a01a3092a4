"""Summaries of results: medians over rounds, ratios over plain decoding. Imports no torch."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from statistics import median
from typing import Any, NamedTuple

from drafter.bench.methods import BASELINES, LLAMA_CPP_BASELINES, engine_of
from drafter.bench.results import BenchRecord


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
    max_new_tokens: int
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
    """Beam width, draft length and number of nodes of the trees of a run."""

    beam_width: int
    draft_length: int
    tree_size: int


@dataclass(frozen=True)
class Summary:
    """The figures of one method under one condition.

    Attributes:
        label: the method, with its drafter, weights or measured sizes where results hold several.
        engine: name of the engine that decodes.
        build: the instruction sets that the engine was built for; empty where it does not say.
        num_rounds: number of runs.
        rate: tokens per second.
        speedup: over plain decoding of this package, round by round; None without such runs.
        over_llama_cpp: over llama.cpp with BF16 weights and without speculation, likewise.
        tokens_per_step: generated tokens per target forward; None where unknown.
        category_speedups: speedup over plain decoding by category (batch size 1).
        category_tokens_per_step: by category, for methods that draft.
        num_identical: texts identical to plain decoding, of ``num_prompts``; None where texts are not compared.
        margins: the target's logit margins where texts first differ.
        first_token_seconds: median over answers, median over rounds.
        latency_seconds: likewise, of whole answers.
        peak_bytes: highest memory of all rounds.
        size: size of the trees, for a drafter with one tree.
        is_baseline: whether the method is plain decoding of this package.
    """

    label: str
    engine: str
    build: str
    num_rounds: int
    rate: Span
    speedup: Span | None
    over_llama_cpp: Span | None
    tokens_per_step: float | None
    category_speedups: dict[str, Span]
    category_tokens_per_step: dict[str, float]
    num_identical: int | None
    num_prompts: int
    margins: list[float]
    first_token_seconds: float
    latency_seconds: float
    peak_bytes: int
    size: Size | None
    is_baseline: bool


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


def shortest_endings(paths: Iterable[str]) -> dict[str, str]:
    """For every path the shortest ending that no other path has.

    Of runs/kd/drafter, runs/ce/drafter and runs/old: kd/drafter, ce/drafter and old.
    """
    parts = {path: PurePosixPath(path).parts for path in paths}
    endings = {}
    for path, own in parts.items():
        others = [other for other in parts.values() if other != own]
        lengths = range(1, len(own) + 1)
        length = next((n for n in lengths if all(own[-n:] != other[-n:] for other in others)), len(own))
        endings[path] = str(PurePosixPath(*own[-length:]))
    return endings


def _labels(runs: Sequence[BenchRecord]) -> list[str]:
    """A label for each run: runs of one label are rounds of one measurement.

    A run whose drafter, weights or measured sizes differ from those of another run of its method names them.
    """
    names = shortest_endings({record["drafter"] for record in runs if record.get("drafter")})
    notes = [
        (
            names.get(record.get("drafter") or "", ""),
            f"weights {(record.get('drafter_fingerprint') or 'unknown')[:8]}",
            f"sizes {(record.get('tuned_digest') or 'unknown')[:8]}",
            f"compile {record.get('compile', 'auto')}",
        )
        for record in runs
    ]
    values: dict[str, list[set[str]]] = {}
    for record, note in zip(runs, notes, strict=True):
        for seen, value in zip(values.setdefault(record["method"], [set(), set(), set(), set()]), note, strict=True):
            seen.add(value)
    labels = []
    for record, note in zip(runs, notes, strict=True):
        told = [value for value, seen in zip(note, values[record["method"]], strict=True) if len(seen) > 1]
        labels.append(record["method"] + (f" ({', '.join(told)})" if told else ""))
    return labels


def _condition_of(record: BenchRecord, has_seeds: bool) -> Condition:
    target, prompts = record["target"], record["prompts"]
    return Condition(
        PurePosixPath(target["name"]).name,
        target["dtype"],
        target["num_parameters"],
        record["device"],
        prompts["name"],
        prompts["digest"],
        prompts["num_prompts"],
        record["max_new_tokens"],
        record["temperature"],
        record["batch_size"],
        record.get("seed") if has_seeds else None,
    )


def _summarise(label: str, rounds: list[BenchRecord], methods: dict[str, list[BenchRecord]]) -> Summary:
    first = rounds[0]
    baseline = next((methods[name] for name in BASELINES if name in methods), [])
    llama_cpp = next((methods[name] for name in LLAMA_CPP_BASELINES if name in methods), [])
    identical = [record["identical"] for record in rounds if record["identical"] is not None]
    categories = [name for name in first["by_category"] if all(name in record["by_category"] for record in rounds)]
    by_category = {name: [{**r["by_category"][name], "round": r["round"]} for r in rounds] for name in categories}
    plain = {name: [{**r["by_category"].get(name, {}), "round": r["round"]} for r in baseline] for name in categories}
    speedups = {name: _speedup(by_category[name], plain[name]) for name in categories}
    steps = {name: _tokens_per_step(by_category[name]) for name in categories}
    return Summary(
        label=label,
        engine=first.get("engine", engine_of(first["method"])),
        build=first.get("build", ""),
        num_rounds=len(rounds),
        rate=Span.of([_rate(record) for record in rounds]),
        speedup=_speedup(rounds, baseline),
        over_llama_cpp=_speedup(rounds, llama_cpp),
        tokens_per_step=_tokens_per_step(rounds),
        category_speedups={name: span for name, span in speedups.items() if span is not None},
        category_tokens_per_step={n: v for n, v in steps.items() if v is not None} if first["acceptance"] else {},
        num_identical=min((item["num_identical"] for item in identical), default=None),
        num_prompts=first["prompts"]["num_prompts"],
        margins=identical[0]["margins"] if identical else [],
        first_token_seconds=median([record["first_token_seconds"]["median"] for record in rounds]),
        latency_seconds=median([record["latency_seconds"]["median"] for record in rounds]),
        peak_bytes=max(record["peak_memory_bytes"]["bytes"] for record in rounds),
        size=_size_of(first),
        is_baseline=first["method"] in BASELINES,
    )


def _rate(sums: Mapping[str, Any]) -> float:
    """Tokens per second; 0 where no time was taken."""
    return float(sums["num_tokens"] / sums["seconds"]) if sums.get("seconds") else 0.0


def _speedup(rounds: Sequence[Mapping[str, Any]], baseline: Sequence[Mapping[str, Any]]) -> Span | None:
    """Ratios of runs of the same round: a machine that slows down does so for both."""
    slow = {record["round"]: _rate(record) for record in baseline}
    ratios = [_rate(record) / slow[record["round"]] for record in rounds if slow.get(record["round"])]
    return Span.of(ratios) if any(ratios) else None


def _tokens_per_step(rounds: Sequence[Mapping[str, Any]]) -> float | None:
    forwards = [record["num_forwards"] for record in rounds]
    is_known = None not in forwards and sum(forwards) > 0
    return sum(record["num_tokens"] for record in rounds) / sum(forwards) if is_known else None


def _size_of(record: BenchRecord) -> Size | None:
    used = record.get("settings") or {}
    values = [value for name in Size._fields if (value := used.get(name)) is not None]
    is_one_tree = record.get("drafter") and ":tuned" not in record["method"] and len(values) == len(Size._fields)
    return Size(*values) if is_one_tree else None
