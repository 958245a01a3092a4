"""`drafter bench`, `bench report`: measurements, and their tables."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from drafter.bench.settings import BenchOptions
from drafter.utils.options import Options


def bench(options: BenchOptions) -> None:
    """Run `drafter bench`."""
    from drafter.bench.report import report
    from drafter.bench.results import read_results
    from drafter.bench.run import run_benchmark
    from drafter.bench.workload import read_prompt_set

    _check_out(options.out)
    workloads = [read_prompt_set(name).take(options.num_prompts) for name in options.prompts]
    models = options.load_models(options.draft_model)
    num_runs = run_benchmark(options, models, workloads)
    print(f"{num_runs} runs made, results in {options.out}", file=sys.stderr)
    print(report(read_results([options.out])))


@dataclass(frozen=True, kw_only=True)
class ReportOptions(Options):
    """Make tables and pictures of results.

    The same results give the same table, byte for byte.

    Attributes:
        results: files of `drafter bench`
        out: folder for report.md and the pictures (PNG and SVG); the table is printed if no folder is given
    """

    positional: ClassVar = "results"
    results: tuple[Path, ...]
    out: Path | None = None


def bench_report(options: ReportOptions) -> None:
    """Run `drafter bench report`."""
    from drafter.bench.report import is_report, report, summarise
    from drafter.bench.results import read_results

    records = read_results(options.results)
    if options.out is None:
        print(report(records))
        return
    from drafter.bench.plots import draw_all
    from drafter.utils.io import write_atomic

    place = options.out / "report.md"
    if place.exists() and not is_report(place):
        raise ValueError(f"{place} exists and no earlier run wrote it: give another folder")
    options.out.mkdir(parents=True, exist_ok=True)
    write_atomic(place, report(records))
    drawn = draw_all(summarise(records), options.out)
    print(f"{place} and {len(drawn)} pictures (PNG and SVG)", file=sys.stderr)


def _check_out(out: Path) -> None:
    from drafter.bench.results import resume_results
    from drafter.utils.io import check_output

    if out.suffix != ".jsonl":
        raise ValueError(f"--out {out} must be a file NAME.jsonl")
    check_output(out, overwrite=True)  # results are appended
    resume_results(out)  # results of another schema are refused before anything is loaded
