"""`drafter bench`, `bench report`, `bench sweep`, `bench serve`: measurements, and their tables."""

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from drafter.bench.settings import BenchSettings, LoadSettings, WorkloadOptions
from drafter.engine.loading import TargetConfig
from drafter.utils.options import Options, part_of
from drafter.utils.validate import within

if TYPE_CHECKING:
    from drafter.bench.models import BenchModels

_LARGEST_SWEPT_TREE = 64


@dataclass(frozen=True, kw_only=True)
class ResultOptions:
    """The output of results.

    Attributes:
        out: results file (.jsonl)
        report: also write the table and the pictures to this folder
    """

    out: Path
    report: Path | None = None


@dataclass(frozen=True, kw_only=True)
class BenchOptions(BenchSettings, ResultOptions):
    """Measure methods against each other on the same prompts.

    Methods take turns, round after round. Each run is appended to --out when it is done; runs in --out are not
    repeated. The table is printed at the end.

    Methods: none, drafter, lookup, draft-model (ours); hf-generate, hf-lookup (transformers); llama-cpp,
    openvino-genai, vllm (engines of their own; --peer-python names the Python of another environment). Options follow a
    colon: drafter:W8:L4:N24, drafter:alone (no copies), drafter:final-beams, drafter:tuned, draft-model:G5,
    llama-cpp:Q4_1 (the wheel xllamacpp), llama-cpp:Q4_1:native (llama-cpp-python, built for the processor).
    """

    sections: ClassVar = {**BenchSettings.sections, "Output": ResultOptions}
    common: ClassVar = ("target", "drafter", "prompts", "methods", "out", "report", "num_prompts", "batch_sizes")


def bench(options: BenchOptions) -> None:
    """Run `drafter bench`."""
    _measure(options, options)


@dataclass(frozen=True, kw_only=True)
class ReportOptions(Options):
    """Make tables and pictures of results.

    The same results give the same table, byte for byte.

    Attributes:
        results: files of `drafter bench`
        out: folder for report.md and the pictures (PNG and SVG); the table is printed if no folder is given
    """

    common: ClassVar = ("results", "out")
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
class ShapeOptions:
    """The tree shapes.

    Attributes:
        drafter: folder of an exported drafter, or name of a drafter that comes with the package
        batch_sizes: prompts that are answered at the same time
        beam_widths: W
        draft_lengths: L
        tree_sizes: N (default: all nodes that W and L draft, at most 64)
        rounds: how often every combination runs
    """

    drafter: str
    batch_sizes: tuple[int, ...] = within((1, 4, 16), low=1, high=1024)
    beam_widths: tuple[int, ...] = within((1, 2, 4, 8, 16), low=1, high=256)
    draft_lengths: tuple[int, ...] = within((4,), low=1, high=32)
    tree_sizes: tuple[int, ...] = within((), low=1, high=1024)
    rounds: int = within(1, low=1)


@dataclass(frozen=True, kw_only=True)
class SweepOptions(Options, ShapeOptions, WorkloadOptions, TargetConfig, ResultOptions):
    """Measure the drafter's speed over batch sizes and tree shapes.

    Every combination runs beside plain decoding at the same batch size. Two sweeps into the same --out compare two
    drafters, such as a drafter trained with distillation and a drafter trained without.
    """

    sections: ClassVar = {
        "What to compare": ShapeOptions,
        "What to answer": WorkloadOptions,
        "Where to run": TargetConfig,
        "Output": ResultOptions,
    }
    common: ClassVar = ("target", "drafter", "prompts", "out", "batch_sizes", "beam_widths", "tree_sizes")


def bench_sweep(options: SweepOptions) -> None:
    """Run `drafter bench sweep`."""
    methods, left_out = sweep_methods(options.beam_widths, options.draft_lengths, options.tree_sizes)
    if left_out:
        print(
            f"left out, because N nodes are too few for L or too many for W and L: {', '.join(left_out)}",
            file=sys.stderr,
        )
    settings = BenchSettings(
        **vars(part_of(options, WorkloadOptions)),
        **vars(part_of(options, TargetConfig)),
        drafter=options.drafter,
        methods=("none", *methods),
        batch_sizes=options.batch_sizes,
        rounds=options.rounds,
    )
    _measure(settings, options)


def sweep_methods(
    widths: tuple[int, ...], lengths: tuple[int, ...], sizes: tuple[int, ...]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The written form of every combination that can be drafted, and those that cannot.

    Raises:
        ValueError: no combination can be drafted.
    """
    methods: list[str] = []
    left_out: list[str] = []
    for width in widths:
        for length in lengths:
            largest = 1 + width * length
            for size in sizes or (min(largest, _LARGEST_SWEPT_TREE),):
                (methods if length < size <= largest else left_out).append(f"drafter:W{width}:L{length}:N{size}")
    if not methods:
        raise ValueError(
            "--tree-sizes are all smaller than --draft-lengths ask for, or larger than --beam-widths and "
            "--draft-lengths can draft: leave them out"
        )
    return tuple(dict.fromkeys(methods)), tuple(dict.fromkeys(left_out))


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

    common: ClassVar = ("url", "prompts", "out", "concurrency", "rate", "num_requests", "max_new_tokens")
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

    levels = [LoadLevel(concurrency=number) for number in options.concurrency]
    levels += [LoadLevel(rate=number) for number in options.rate]
    levels = levels or [LoadLevel(concurrency=number) for number in (1, 4, 16)]
    if options.out is not None:
        _check_out(options.out)
    keep = partial(append_result, options.out) if options.out is not None else None
    print(load_table(run_load(options, read_prompt_set(options.prompts), levels, keep)))


def _measure(settings: BenchSettings, output: ResultOptions) -> None:
    """Measure, then print and write the report."""
    from drafter.bench.report import report
    from drafter.bench.results import read_results
    from drafter.bench.run import run_benchmark
    from drafter.bench.workload import read_prompt_set

    _check_out(output.out)
    if output.report is not None:
        _check_report(output.report)
    workloads = [read_prompt_set(name).take(settings.num_prompts) for name in settings.prompts]
    num_runs = run_benchmark(settings, _load_models(settings), workloads, output.out)
    print(f"{num_runs} runs made, results in {output.out}", file=sys.stderr)
    records = read_results([output.out])
    print(report(records))
    if output.report is not None:
        _write_report(records, output.report)


def _load_models(settings: BenchSettings) -> "BenchModels":
    from drafter.bench.models import BenchModels
    from drafter.engine.loading import load_drafter

    target = settings.load()
    drafter, peer_target, draft_model = None, None, None
    if target.is_packed and any(spec.engine == "transformers" for spec in settings.specs):
        peer_target = settings.load(pack=False)  # transformers' own methods run on the model as transformers loads it
    if any(spec.needs_draft_model for spec in settings.specs):
        draft_model = settings.load(settings.draft_model, pack=False)
    if any(spec.needs_drafter for spec in settings.specs):
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
