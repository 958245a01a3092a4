"""The report: figures and Markdown tables from records, the same bytes from the same records. Imports no torch.

Figures are medians over rounds, and ratios over plain decoding within a round.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePosixPath
from statistics import median
from typing import NamedTuple

from drafter.bench.results import BenchRecord
from drafter.bench.settings import BASELINE
from drafter.decoding.acceptance import tokens_per_step
from drafter.utils.tables import format_table

_PACKAGES = ("torch", "transformers", "llama-cpp-python", "ik-llama-cpp-python")
_LLAMA_CPP_BASELINES = ("llama-cpp", "llama-cpp:BF16")  # llama.cpp with BF16 weights and without speculation


class Span(NamedTuple):
    """A figure over the rounds: median, least and greatest."""

    middle: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Span":
        return cls(median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{self.middle:.2f}x ({self.low:.2f} to {self.high:.2f})"


class Measured(NamedTuple):
    """The runs of one method at one batch size, one for each round.

    Attributes:
        label: the method, with drafter, weights and measured sizes where the table has several.
        rounds: the records.
        others: the runs of all methods of the table at this batch size, by label.
    """

    label: str
    rounds: list[BenchRecord]
    others: Mapping[str, list[BenchRecord]]

    @property
    def rate(self) -> Span:
        """Tokens per second."""
        return Span.of([_rate(record) for record in self.rounds])

    @property
    def tokens_per_step(self) -> float:
        """Generated tokens per target forward."""
        return tokens_per_step([(record["num_tokens"], record["num_forwards"]) for record in self.rounds]).value

    def over(self, *labels: str, category: str | None = None) -> Span | None:
        """Speed over the first of these methods that was run, perhaps of one category of prompts; None without runs.

        Ratios are those of runs of the same round: a machine that slows down does so for both.
        """
        base = next((self.others[label] for label in labels if label in self.others), [])
        slow = {record["round"]: _rate(record, category) for record in base}
        ratios = [_rate(each, category) / slow[each["round"]] for each in self.rounds if slow.get(each["round"])]
        return Span.of(ratios) if any(ratios) else None

    @property
    def identical(self) -> str:
        """The least number of texts that equal plain decoding; `-` where texts are not compared."""
        counts = [record["identical"]["num_identical"] for record in self.rounds if "identical" in record]
        return f"{min(counts)}/{self.rounds[0]['prompts']['num_prompts']}" if counts else "-"


def summarise(records: Sequence[BenchRecord]) -> list[list[Measured]]:
    """A table for each target, prompt set and sampling; tables, batch sizes and methods as they first appear."""
    groups: dict[tuple[str, str, str], list[BenchRecord]] = {}
    for record in records:
        groups.setdefault(_condition_of(record), []).append(record)
    return [_measured(runs) for runs in groups.values()]


def _measured(runs: Sequence[BenchRecord]) -> list[Measured]:
    """The methods of one table; a label names drafter, weights and sizes where runs of its method differ in these."""

    def name_of(record: BenchRecord) -> str:
        weights, sizes = (record.get(key, "unknown")[:8] for key in ("drafter_fingerprint", "tuned_digest"))
        return f"{record['method']} ({record.get('drafter', '')}, weights {weights}, sizes {sizes})"

    num_names = Counter(method for method, _ in {(record["method"], name_of(record)) for record in runs})
    sizes: dict[int, dict[str, list[BenchRecord]]] = {}
    for record in runs:
        label = record["method"] if num_names[record["method"]] == 1 else name_of(record)
        sizes.setdefault(record["batch_size"], {}).setdefault(label, []).append(record)
    return [Measured(label, rounds, methods) for methods in sizes.values() for label, rounds in methods.items()]


def _condition_of(record: BenchRecord) -> tuple[str, str, str]:
    """What the methods of one table share: its title, its description, and the device. Greedy text has no seed."""
    target, prompts, temperature = record["target"], record["prompts"], record["temperature"]
    sampling = f"temperature {temperature:g}, seed {record.get('seed')}" if temperature else "greedy"
    size = target["num_parameters"] / 1e6
    parameters = f"{size / 1000:.1f} billion" if size >= 1000 else f"{size:.0f} million"
    about = (
        f"{PurePosixPath(target['name']).name}, {target['dtype']}, {parameters} parameters; {prompts['num_prompts']} "
        f"prompts, answers of at most {record['max_new_tokens']} tokens; prompts {prompts['digest']}"
    )
    return f"{prompts['name']}, {sampling}", about, record["device"]


def _rate(record: BenchRecord, category: str | None = None) -> float:
    """Tokens per second of a run, or of one category of its prompts; 0 where no time was taken."""
    sums = record if category is None else record["by_category"].get(category, {})
    return float(sums["num_tokens"] / sums["seconds"]) if sums.get("seconds") else 0.0


def report(records: Sequence[BenchRecord]) -> str:
    """All records as Markdown: where and when, and a section for each prompt set and sampling."""
    dates = sorted({record["date"][:10] for record in records})
    machines: dict[str, None] = {}
    for machine in (record["machine"] for record in records):
        name = machine.get("device") or machine.get("cpu") or machine["system"]
        memory = f", {machine['memory_gib']:g} GiB of memory" if machine.get("memory_gib") else ""
        machines[f"{name} ({machine['num_cpus']} cores{memory})"] = None
    used = {name: dict.fromkeys(r["versions"][name] for r in records if name in r["versions"]) for name in _PACKAGES}
    versions = ", ".join(f"{name} {' and '.join(values)}" for name, values in used.items() if values)
    revisions = dict.fromkeys((record.get("git_revision") or "unknown")[:12] for record in records)
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    sections = [
        "# Benchmark results\n",
        f"Measured {when} on {'; '.join(machines)}. {versions}; revision {', '.join(revisions)}. "
        "Speeds are medians over rounds, with the least and the greatest; speedups are ratios within a round.\n",
    ]
    for methods in summarise(records):
        title, about, _ = _condition_of(methods[0].rounds[0])
        rounds = " or ".join(str(number) for number in sorted({len(each.rounds) for each in methods}))
        sections += [f"## {title}\n", f"{about}; {rounds} rounds.\n", _main_table(methods)]
        built = {each.label: each.rounds[0].get("build") for each in methods}
        sections += [f"{label} was built for {build}.\n" for label, build in built.items() if build]
        # Speedup by category, for prompt sets that have categories. Rows of a batch have no times of their own.
        categories = dict.fromkeys(name for each in methods for name in each.rounds[0]["by_category"])
        lines = []
        for each in methods:
            spans = [each.over(BASELINE, category=name) for name in categories]
            if any(spans) and each.label != BASELINE:
                lines.append([each.label, *("-" if span is None else f"{span.middle:.2f}x" for span in spans)])
        if lines:
            sections.append("### Speedup over plain decoding by category, one prompt at a time\n")
            sections.append(format_table(["method", *categories], lines) + "\n")
    return "\n".join(sections)


def _main_table(methods: Sequence[Measured]) -> str:
    """One row for each method; columns that say nothing about these methods are left out."""
    columns: dict[str, Callable[[Measured], str]] = {
        "method": lambda m: m.label,
        "batch size": lambda m: str(m.rounds[0]["batch_size"]),
        "tokens/s": lambda m: f"{m.rate.middle:.1f} ({m.rate.low:.1f} to {m.rate.high:.1f})",
        "over plain decoding": lambda m: str(m.over(BASELINE) or "-"),
        "over llama.cpp BF16": lambda m: str(m.over(*_LLAMA_CPP_BASELINES) or "-"),
        "tokens per step": lambda m: f"{m.tokens_per_step:.2f}",
        "identical texts": lambda m: m.identical,
        "peak GiB": lambda m: f"{max(record['peak_memory_bytes']['bytes'] for record in m.rounds) / 2**30:.2f}",
    }
    if {each.rounds[0]["batch_size"] for each in methods} == {1}:
        del columns["batch size"]
    if not any(each.over(*_LLAMA_CPP_BASELINES) for each in methods):
        del columns["over llama.cpp BF16"]
    return format_table(list(columns), [[show(each) for show in columns.values()] for each in methods]) + "\n"
