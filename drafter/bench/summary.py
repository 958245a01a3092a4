"""From records to figures: rounds become medians, and every method is set beside plain decoding. No torch here."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from drafter.bench.figures import median, survival
from drafter.bench.methods import BASELINE, NATIVE_BASELINES, PEER_BASELINE, parse_method
from drafter.bench.records import Record
from drafter.engine.config import EngineConfig


class Corner(NamedTuple):
    """What the methods of one table have in common.

    ``seed`` is None in the corners of results that all have the same: it tells nothing apart there.
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
    """Beam width, draft length and tree size that a redrafter run was set to; the size of the tree as it was."""

    beam_width: int
    draft_length: int
    tree_size: int


@dataclass(frozen=True)
class Summary:
    """One method in one corner.

    Attributes:
        label: the method, with its drafter's name where results hold several, and what else tells its files apart.
        engine: what decodes.
        num_rounds: runs behind the figures.
        rate: tokens per second.
        speedup: over plain decoding of our engine, round by round; None where that was not run.
        speedup_over_peer: over transformers' plain `generate`, likewise.
        speedup_over_llama_cpp: over llama.cpp with BF16 weights and without speculation, likewise.
        tokens_per_step: generated tokens per target forward; None where nobody counted.
        survival: share of steps that keep at least 1, 2, ... drafted tokens; empty where nobody counted.
        category_speedups: speedup over plain decoding by category (batch size 1).
        category_tokens_per_step: by category.
        num_identical: conversations identical to plain decoding, of ``num_prompts``; None: they cannot be compared.
        margins: the target's logit margins where texts first differ.
        first_token_seconds: median over answers, median over rounds.
        latency_seconds: likewise, of whole answers.
        peak_bytes: the highest of all rounds.
        size: of the tree, for redrafter with a fixed one.
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


Tables = dict[Corner, list[Summary]]


def summarise(records: Iterable[Record]) -> Tables:
    """Summaries of all runs, corners and methods in order of first appearance."""
    runs = [record for record in records if record["kind"] == "run"]
    labels = _labels(runs)
    has_seeds = len({record.get("seed") for record in runs}) > 1
    by_corner: dict[Corner, dict[str, list[Record]]] = {}
    for record, label in zip(runs, labels, strict=True):
        by_corner.setdefault(_corner_of(record, has_seeds), {}).setdefault(label, []).append(record)
    return {
        corner: [_summarise(label, rounds, methods) for label, rounds in methods.items()]
        for corner, methods in by_corner.items()
    }


def short_name(path: str) -> str:
    """The last part of a folder's or model's name."""
    return path.rstrip("/").rpartition("/")[2]


def distinct_names(paths: Iterable[str]) -> dict[PurePosixPath, str]:
    """For every path the fewest of its last parts that no other path ends with.

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


def _labels(runs: Sequence[Record]) -> list[str]:
    """What to call each run's method, so that runs of the same name are repetitions of each other."""
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


def _files_of(record: Record) -> tuple[PurePosixPath, str | None, str | None]:
    """Where the drafter lay, its weights, and the plan that a tuned method went by; older results lack the latter."""
    path = PurePosixPath(record["drafter"])
    return path, record.get("drafter_fingerprint"), record.get("tuned_digest")


def _short(digest: str | None) -> str:
    return "unknown" if digest is None else digest[:8]


def _corner_of(record: Record, has_seeds: bool) -> Corner:
    target, prompts = record["target"], record["prompts"]
    return Corner(
        short_name(target["name"]),
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


def _summarise(label: str, rounds: list[Record], methods: dict[str, list[Record]]) -> Summary:
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
        rate=Span.of([_rate(record) for record in rounds]),
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


def _rate(sums: dict[str, Any]) -> float:
    return sums["num_tokens"] / sums["seconds"] if sums["seconds"] else 0.0


def _speedup(rounds: list[Record], baseline: list[Record]) -> Span | None:
    """Ratios of runs of the same round: a machine that slows down does so for both."""
    slow = {record["round"]: _rate(record) for record in baseline}
    ratios = [_rate(record) / slow[record["round"]] for record in rounds if slow.get(record["round"])]
    return Span.of(ratios) if ratios else None


def _category_speedups(rounds: list[Record], baseline: list[Record]) -> dict[str, float]:
    slow = {record["round"]: record["by_category"] for record in baseline}
    found = {}
    for category in rounds[0]["by_category"]:
        ratios = [
            _rate(record["by_category"][category]) / _rate(slow[record["round"]][category])
            for record in rounds
            if record["by_category"][category]["seconds"]
            and slow.get(record["round"], {}).get(category, {}).get("seconds")
        ]
        if ratios:
            found[category] = median(ratios)
    return found


def _category_tokens_per_step(rounds: list[Record]) -> dict[str, float]:
    found = {}
    for category in rounds[0]["by_category"]:
        sums = [record["by_category"][category] for record in rounds]
        forwards = [item["num_forwards"] for item in sums]
        if None not in forwards and sum(forwards):
            found[category] = sum(item["num_tokens"] for item in sums) / sum(forwards)
    return found


def _size_of(record: Record) -> Size | None:
    spec = parse_method(record["method"])
    if spec.name != "redrafter" or spec.is_tuned or "final-beams" in spec.words:
        return None
    used = record.get("settings", {})
    tree = {name: used[name] for name in ("beam_width", "draft_length", "tree_size") if name in used}
    config = EngineConfig(**{**spec.fields, **tree})
    return Size(config.beam_width, config.draft_length, config.num_nodes)


def _added(histograms: Sequence[list[int] | None]) -> list[int]:
    known = [counts for counts in histograms if counts]
    length = max(map(len, known), default=0)
    return [sum(counts[k] for counts in known if k < len(counts)) for k in range(length)]
