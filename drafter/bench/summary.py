"""Figures of results: medians over rounds, ratios over plain decoding. Imports no torch."""

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
class Measured:
    """The runs of one method at one batch size, one for each round.

    Attributes:
        label: the method, with drafter, weights and measured sizes where results hold several.
        rounds: the records.
        others: the records of all methods under the same conditions and at the same batch size, by label.
    """

    label: str
    rounds: list[BenchRecord]
    others: Mapping[str, list[BenchRecord]]

    @property
    def batch_size(self) -> int:
        """Prompts answered at the same time."""
        return int(self.rounds[0]["batch_size"])

    @property
    def is_baseline(self) -> bool:
        """Whether the method is plain decoding of this package."""
        return bool(self.rounds[0]["method"] == BASELINE)

    @property
    def rate(self) -> Span:
        """Tokens per second."""
        return Span.of([_rate(record) for record in self.rounds])

    @property
    def tokens_per_step(self) -> float | None:
        """Generated tokens per target forward; None where unknown."""
        forwards = [record["num_forwards"] for record in self.rounds]
        is_known = None not in forwards and sum(forwards) > 0
        return sum(record["num_tokens"] for record in self.rounds) / sum(forwards) if is_known else None

    @property
    def over_llama_cpp(self) -> Span | None:
        """Speed over llama.cpp with BF16 weights and without speculation, round by round; None without such runs."""
        known = [self.others[name] for name in LLAMA_CPP_BASELINES if name in self.others]
        return _ratios(self.rounds, known[0]) if known else None

    def speedup(self, category: str | None = None) -> Span | None:
        """Speed over plain decoding, round by round, of all prompts or of a category; None without such runs."""
        both = (self.rounds, self.others.get(BASELINE, []))
        return _ratios(*([_part_of(record, category) for record in runs] for runs in both))

    @property
    def category_speedups(self) -> dict[str, Span]:
        """Speed over plain decoding by category, of single prompts."""
        found = {name: self.speedup(name) for name in self.rounds[0]["by_category"]}
        return {name: span for name, span in found.items() if span is not None}


Tables = dict[Condition, list[Measured]]


def summarise(records: Iterable[BenchRecord]) -> Tables:
    """All runs: conditions, batch sizes and methods in order of first appearance."""
    runs = [record for record in records if record["kind"] == "run"]
    groups: dict[tuple[Condition, int], dict[str, list[BenchRecord]]] = {}
    for record, label in zip(runs, _labels(runs), strict=True):
        key = (_condition_of(record), record["batch_size"])
        groups.setdefault(key, {}).setdefault(label, []).append(record)
    tables: Tables = {}
    for (condition, _), methods in groups.items():
        tables.setdefault(condition, []).extend(Measured(label, runs, methods) for label, runs in methods.items())
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


def _part_of(record: BenchRecord, category: str | None) -> Mapping[str, Any]:
    """The sums of a run, or of one category of its prompts."""
    return record if category is None else {**record["by_category"].get(category, {}), "round": record["round"]}


def _rate(sums: Mapping[str, Any]) -> float:
    """Tokens per second; 0 where no time was taken."""
    return float(sums["num_tokens"] / sums["seconds"]) if sums.get("seconds") else 0.0


def _ratios(rounds: Sequence[Mapping[str, Any]], baseline: Sequence[Mapping[str, Any]]) -> Span | None:
    """Ratios of runs of the same round: a machine that slows down does so for both."""
    slow = {record["round"]: _rate(record) for record in baseline}
    ratios = [_rate(record) / slow[record["round"]] for record in rounds if slow.get(record["round"])]
    return Span.of(ratios) if any(ratios) else None
