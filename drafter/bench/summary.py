"""Summaries of results: medians over rounds, ratios over plain decoding. Imports no torch."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from statistics import median
from typing import Any, NamedTuple

from drafter.bench.methods import BASELINE, LLAMA_CPP_BASELINES
from drafter.bench.results import BenchRecord


class Condition(NamedTuple):
    """The conditions that the methods of one table share; ``seed`` is None for greedy text."""

    target: str
    dtype: str
    num_parameters: int
    device: str
    prompts: str
    digest: str
    num_prompts: int
    max_new_tokens: int
    temperature: float
    seed: int | None

    @property
    def sampling(self) -> str:
        """How tokens are chosen, for titles."""
        return "greedy" if self.temperature == 0 else f"temperature {self.temperature:g}, seed {self.seed}"


class Span(NamedTuple):
    """A figure over the rounds: median, least and greatest."""

    middle: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Span":
        return cls(median(values), min(values), max(values))


@dataclass(frozen=True)
class Summary:
    """The figures of one method at one batch size.

    Attributes:
        label: the method, with drafter, weights and measured sizes where results hold several.
        batch_size: prompts answered at the same time.
        method: the method alone.
        build: the instruction sets that the engine was built for; empty where it does not say.
        num_rounds: number of runs.
        rate: tokens per second.
        speedup: over plain decoding of this package, round by round; None without such runs.
        over_llama_cpp: over llama.cpp with BF16 weights and without speculation, likewise.
        tokens_per_step: generated tokens per target forward; None where unknown.
        category_speedups: speedup over plain decoding by category (batch size 1).
        num_identical: texts identical to plain decoding; None where texts are not compared.
        margins: the target's logit margins where texts first differ.
        peak_bytes: highest memory of all rounds.
    """

    label: str
    batch_size: int
    method: str
    build: str
    num_rounds: int
    rate: Span
    speedup: Span | None
    over_llama_cpp: Span | None
    tokens_per_step: float | None
    category_speedups: dict[str, Span]
    num_identical: int | None
    margins: list[float]
    peak_bytes: int

    @property
    def is_baseline(self) -> bool:
        """Whether the method is plain decoding of this package."""
        return self.method == BASELINE


Tables = dict[Condition, list[Summary]]


def summarise(records: Iterable[BenchRecord]) -> Tables:
    """Summaries of all runs: conditions, batch sizes and methods in order of first appearance."""
    runs = [record for record in records if record["kind"] == "run"]
    groups: dict[tuple[Condition, int], dict[str, list[BenchRecord]]] = {}
    for record, label in zip(runs, _labels(runs), strict=True):
        key = (_condition_of(record), record["batch_size"])
        groups.setdefault(key, {}).setdefault(label, []).append(record)
    tables: Tables = {}
    for (condition, _), methods in groups.items():
        tables.setdefault(condition, []).extend(_summarise(label, runs, methods) for label, runs in methods.items())
    return tables


def _labels(runs: Sequence[BenchRecord]) -> list[str]:
    """A label for each run: runs of one label are rounds of one measurement.

    A run whose drafter, weights or measured sizes differ from those of another run of its method names them.
    """

    def name_of(record: BenchRecord) -> str:
        weights, sizes = ((record.get(key) or "unknown")[:8] for key in ("drafter_fingerprint", "tuned_digest"))
        drafter, compile = record.get("drafter") or "", record.get("compile", "auto")
        return f"{record['method']} ({drafter}, weights {weights}, sizes {sizes}, compile {compile})"

    num_names = Counter(method for method, _ in {(record["method"], name_of(record)) for record in runs})
    return [record["method"] if num_names[record["method"]] == 1 else name_of(record) for record in runs]


def _condition_of(record: BenchRecord) -> Condition:
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
        record.get("seed") if record["temperature"] else None,
    )


def _summarise(label: str, rounds: list[BenchRecord], methods: dict[str, list[BenchRecord]]) -> Summary:
    first = rounds[0]
    baseline = methods.get(BASELINE, [])
    llama_cpp = next((methods[name] for name in LLAMA_CPP_BASELINES if name in methods), [])
    identical = [record["identical"] for record in rounds if record["identical"] is not None]
    speedups = {
        name: _speedup(_of_category(rounds, name), _of_category(baseline, name))
        for name in first["by_category"]
        if all(name in record["by_category"] for record in rounds)
    }
    return Summary(
        label=label,
        batch_size=first["batch_size"],
        method=first["method"],
        build=first.get("build", ""),
        num_rounds=len(rounds),
        rate=Span.of([_rate(record) for record in rounds]),
        speedup=_speedup(rounds, baseline),
        over_llama_cpp=_speedup(rounds, llama_cpp),
        tokens_per_step=_tokens_per_step(rounds),
        category_speedups={name: span for name, span in speedups.items() if span is not None},
        num_identical=min((item["num_identical"] for item in identical), default=None),
        margins=identical[0]["margins"] if identical else [],
        peak_bytes=max(record["peak_memory_bytes"]["bytes"] for record in rounds),
    )


def _of_category(rounds: Sequence[BenchRecord], name: str) -> list[Mapping[str, Any]]:
    return [{**record["by_category"].get(name, {}), "round": record["round"]} for record in rounds]


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
