"""The report: Markdown tables from records, the same bytes from the same records. Imports no torch."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median

from drafter.bench.results import BenchRecord
from drafter.bench.summary import Condition, Measured, Span, summarise
from drafter.utils.tables import format_table

_TITLE = "# Benchmark results\n"
_PACKAGES = ("torch", "transformers", "xllamacpp", "llama-cpp-python", "openvino", "vllm")


def report(records: Sequence[BenchRecord]) -> str:
    """All records as Markdown: where and when, a section for each prompt set and sampling, then load on servers."""
    sections = [_TITLE, _provenance(records)]
    for condition, methods in summarise(records).items():
        built = {each.label: each.rounds[0].get("build") for each in methods}
        sections += [f"## {condition.prompts}, {condition.sampling}\n", _about(condition, methods)]
        sections += [_main_table(condition, methods)]
        sections += [f"{label} was built for {build}.\n" for label, build in built.items() if build]
        sections += _category_table(methods)
    loads = [record for record in records if record["kind"] == "load"]
    sections += ["## Load on a server\n", load_table(loads)] if loads else []
    return "\n".join(sections)


def is_report(path: Path) -> bool:
    """Whether a file is a report that this module made."""
    with path.open(encoding="utf-8", errors="replace") as stream:
        return stream.readline() == _TITLE


def _provenance(records: Sequence[BenchRecord]) -> str:
    """When, on which machines, and with which versions the records were measured."""
    dates = sorted({record["date"][:10] for record in records})
    machines = _distinct(_machine(record) for record in records)
    used = {name: _distinct(r["versions"][name] for r in records if name in r["versions"]) for name in _PACKAGES}
    versions = ", ".join(f"{name} {' and '.join(values)}" for name, values in used.items() if values)
    revisions = _distinct((record.get("git_revision") or "unknown")[:12] for record in records)
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return (
        f"Measured {when} on {'; '.join(machines)}. {versions}; revision {', '.join(revisions)}. "
        "Speeds are medians over rounds, with the least and the greatest; speedups are ratios within a round.\n"
    )


def _machine(record: BenchRecord) -> str:
    machine = record["machine"]
    name = machine.get("device") or machine.get("cpu") or machine["system"]
    memory = f", {machine['memory_gib']:g} GiB of memory" if machine.get("memory_gib") else ""
    return f"{name} ({machine['num_cpus']} cores{memory})"


def _about(condition: Condition, methods: Sequence[Measured]) -> str:
    """Target, prompts, length of the answers and number of rounds."""
    size = condition.num_parameters / 1e6
    parameters = f"{size / 1000:.1f} billion" if size >= 1000 else f"{size:.0f} million"
    rounds = " or ".join(str(number) for number in sorted({len(each.rounds) for each in methods}))
    return (
        f"{condition.target}, {condition.dtype}, {parameters} parameters; {condition.num_prompts} prompts, "
        f"answers of at most {condition.max_new_tokens} tokens; {rounds} rounds; prompts {condition.digest}.\n"
    )


def _main_table(condition: Condition, methods: Sequence[Measured]) -> str:
    """One row for each method; columns that say nothing about these methods are left out."""
    columns: dict[str, Callable[[Measured], str]] = {
        "method": lambda m: m.label,
        "batch size": lambda m: str(m.batch_size),
        "tokens/s": lambda m: f"{m.rate.middle:.1f} ({m.rate.low:.1f} to {m.rate.high:.1f})",
        "over plain decoding": lambda m: _times_span(m.speedup()),
        "over llama.cpp BF16": lambda m: _times_span(m.over_llama_cpp),
        "tokens per step": lambda m: "-" if m.tokens_per_step is None else f"{m.tokens_per_step:.2f}",
        "identical texts": lambda m: _identical(m.rounds, condition.num_prompts),
        "margin where they differ": lambda m: _margins((m.rounds[0]["identical"] or {}).get("margins", [])),
        "peak GiB": lambda m: f"{max(record['peak_memory_bytes']['bytes'] for record in m.rounds) / 2**30:.2f}",
    }
    if {each.batch_size for each in methods} == {1}:
        del columns["batch size"]
    if not any(each.over_llama_cpp for each in methods):
        del columns["over llama.cpp BF16"]
    return format_table(list(columns), [[show(each) for show in columns.values()] for each in methods]) + "\n"


def _category_table(methods: Sequence[Measured]) -> list[str]:
    """Speedup by category, for prompt sets that have categories."""
    rows = {each.label: each.category_speedups for each in methods if each.category_speedups and not each.is_baseline}
    categories = _distinct(category for speedups in rows.values() for category in speedups)
    cells = [
        [label, *(f"{speedups[name].middle:.2f}x" if name in speedups else "-" for name in categories)]
        for label, speedups in rows.items()
    ]
    title = "### Speedup over plain decoding by category, one prompt at a time\n"
    return [title, format_table(["method", *categories], cells) + "\n"] if rows else []


def load_table(loads: Sequence[BenchRecord]) -> str:
    """One row for each level of load."""
    figures = (
        ("first token ms", "first_token_seconds", 1e3, 0),
        ("ms per token", "token_seconds", 1e3, 1),
        ("answer s", "latency_seconds", 1, 2),
    )
    columns = ["server", "load", "requests", "failed", "tokens/s"]
    columns += [f"{title}, {share}" for title, *_ in figures for share in ("p50", "p95", "p99")]
    rows = []
    for load in loads:
        asked = f"{load['concurrency']} at a time" if load["rate"] is None else f"{load['rate']:g} per second"
        rate = f"{load['num_tokens'] / load['seconds']:.1f}" if load["seconds"] else "-"
        row = [load["model"], asked, str(load["num_requests"]), str(load["num_failed"]), rate]
        for _, key, factor, digits in figures:
            row += [f"{factor * load[key][share]:.{digits}f}" for share in ("median", "p95", "p99")]
        rows.append(row)
    return format_table(columns, rows) + "\n"


def _times_span(span: Span | None) -> str:
    return "-" if span is None else f"{span.middle:.2f}x ({span.low:.2f} to {span.high:.2f})"


def _identical(rounds: Sequence[BenchRecord], num_prompts: int) -> str:
    """The least number of texts that equal plain decoding; `-` where texts are not compared."""
    least = min((record["identical"]["num_identical"] for record in rounds if record["identical"]), default=None)
    return "-" if least is None else f"{least}/{num_prompts}"


def _margins(margins: Sequence[float]) -> str:
    if not margins:
        return "-"
    sizes = [abs(margin) for margin in margins]
    return f"{median(sizes):.3f} (max {max(sizes):.3f})"


def _distinct(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(texts))
