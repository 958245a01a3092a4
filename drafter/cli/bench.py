"""`drafter bench`, `bench report`, `bench serve`: measurements, and their tables."""

import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from drafter.bench.settings import BenchSettings, LoadSettings
from drafter.utils.options import Options
from drafter.utils.validate import within

if TYPE_CHECKING:
    from drafter.bench.models import BenchModels


@dataclass(frozen=True, kw_only=True)
class BenchOptions(BenchSettings):
    """Measure methods against each other on the same prompts.

    Methods take turns, round after round. Each run is appended to --out when it is done; runs in --out are not
    repeated. The table is printed at the end.

    Methods: none, drafter, lookup, draft-model (ours); hf-generate, hf-lookup (transformers); llama-cpp, vllm (engines
    of their own; --peer-python names the Python of another environment). Options follow a colon: drafter:W8:L4:N24,
    drafter:alone (no copies), drafter:final-beams, drafter:tuned, draft-model:G5, llama-cpp:Q4_1 (the wheel xllamacpp),
    llama-cpp:Q4_1:native (llama-cpp-python, built for the processor).

    Attributes:
        out: results file (.jsonl)
        report: also write the table and the picture to this folder
    """

    out: Path
    report: Path | None = None


def bench(options: BenchOptions) -> None:
    """Run `drafter bench`."""
    from drafter.bench.report import report
    from drafter.bench.results import read_results
    from drafter.bench.run import run_benchmark
    from drafter.bench.workload import read_prompt_set

    _check_out(options.out)
    if options.report is not None:
        _check_report(options.report)
    workloads = [read_prompt_set(name).take(options.num_prompts) for name in options.prompts]
    num_runs = run_benchmark(options, _load_models(options), workloads, options.out)
    print(f"{num_runs} runs made, results in {options.out}", file=sys.stderr)
    records = read_results([options.out])
    print(report(records))
    if options.report is not None:
        _write_report(records, options.report)


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
    from drafter.bench.report import report
    from drafter.bench.results import read_results

    records = read_results(options.results)
    if options.out is None:
        print(report(records))
    else:
        _check_report(options.out)
        _write_report(records, options.out)


@dataclass(frozen=True, kw_only=True)
class LoadOptions(Options, LoadSettings):
    """Put load on a server that speaks OpenAI's protocol.

    Measures throughput, the time to the first token and the time per token. The key of OPENAI_API_KEY is sent if set.

    Attributes:
        prompts: file of prompts, hub data set, or a name: evaluation, default, mtbench, humaneval, gsm8k
        out: results file (.jsonl); each level of load is appended when it ends
        concurrency: levels of load: requests at the same time (default: 1,4,16)
        rate: levels of load: requests per second on average, arriving at random
    """

    prompts: str = "evaluation"
    out: Path | None = None
    concurrency: tuple[int, ...] = within((), low=1)
    rate: tuple[float, ...] = within((), above=0.0)


def bench_serve(options: LoadOptions) -> None:
    """Run `drafter bench serve`."""
    from drafter.bench.load import LoadLevel, run_load
    from drafter.bench.report import load_table
    from drafter.bench.results import append_result
    from drafter.bench.workload import read_prompt_set
    from drafter.distill.client import Client

    Client(options.url, flag="--url")  # a wrong address is refused before anything is read
    levels = [LoadLevel(concurrency=number) for number in options.concurrency]
    levels += [LoadLevel(rate=number) for number in options.rate]
    levels = levels or [LoadLevel(concurrency=number) for number in (1, 4, 16)]
    if options.out is not None:
        _check_out(options.out)
    keep = partial(append_result, options.out) if options.out is not None else None
    print(load_table(run_load(options, read_prompt_set(options.prompts), levels, keep)))


def _load_models(settings: BenchSettings) -> "BenchModels":
    from drafter.bench.models import BenchModels
    from drafter.engine.loading import load_drafter
    from drafter.engine.tuned import dtype_name

    target = settings.load()
    drafter, peer_target, draft_model = None, None, None
    if target.is_packed and any(spec.engine == "transformers" for spec in settings.specs):
        # transformers' own methods run on the model as transformers loads it, of a GGUF file on its unpacked weights.
        number_format: Any = dtype_name(target.dtype)
        peer_target = replace(settings, dtype=number_format, runtime="torch").load(pack=False)
    if any(spec.name == "draft-model" for spec in settings.specs):
        draft_model = settings.load(settings.draft_model, pack=False)
    if any(spec.name == "drafter" for spec in settings.specs):
        assert settings.drafter is not None
        drafter = load_drafter(settings.drafter, target)
    name, compile = settings.drafter or "", settings.compile
    return BenchModels(target, drafter, name, draft_model, peer_target, settings.pythons, compile)


def _check_out(out: Path) -> None:
    from drafter.bench.results import resume_results
    from drafter.utils.io import check_output

    if out.suffix != ".jsonl":
        raise ValueError(f"--out {out} must be a file NAME.jsonl")
    check_output(out, overwrite=True)  # results are appended
    resume_results(out)  # results of another schema are refused before anything is loaded


def _check_report(folder: Path) -> None:
    """Refuse to replace a report.md that no earlier run wrote."""
    from drafter.bench.report import is_report

    place = folder / "report.md"
    if place.exists() and not is_report(place):
        raise ValueError(f"{place} exists and no earlier run wrote it: give another folder")
    folder.mkdir(parents=True, exist_ok=True)


def _write_report(records: list[dict[str, Any]], folder: Path) -> None:
    from drafter.bench.plots import draw_all
    from drafter.bench.report import report
    from drafter.bench.summary import summarise
    from drafter.utils.io import write_atomic

    write_atomic(folder / "report.md", report(records))
    drawn = draw_all(summarise(records), folder)
    print(f"{folder / 'report.md'} and {len(drawn)} pictures (PNG and SVG)", file=sys.stderr)
