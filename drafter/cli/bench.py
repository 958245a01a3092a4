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
    from drafter.bench.results import read_results, resume_results
    from drafter.bench.run import run_benchmark
    from drafter.bench.workload import read_prompt_set
    from drafter.utils.provenance import check_output

    if options.out.suffix != ".jsonl":
        raise ValueError(f"--out {options.out} must be a file NAME.jsonl")
    check_output(options.out, overwrite=True)  # results are appended
    resume_results(options.out)  # results of another schema are refused before anything is loaded
    workloads = [read_prompt_set(name).take(options.num_prompts) for name in options.prompts]
    num_runs = run_benchmark(options, options.load_models(options.draft_model), workloads)
    print(f"{num_runs} runs made, results in {options.out}", file=sys.stderr)
    print(report(read_results([options.out])))


@dataclass(frozen=True, kw_only=True)
class ReportOptions(Options):
    """Print the tables of results as Markdown.

    The same results give the same text, byte for byte.

    Attributes:
        results: files of `drafter bench`
    """

    positional: ClassVar = "results"
    results: tuple[Path, ...]


def bench_report(options: ReportOptions) -> None:
    """Run `drafter bench report`."""
    from drafter.bench.report import report
    from drafter.bench.results import read_results

    print(report(read_results(options.results)))
