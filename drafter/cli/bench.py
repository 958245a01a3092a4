"""`drafter bench`, `bench report`, `bench sweep`, `bench serve`: measurements, and their tables."""

import sys
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from drafter.bench.settings import BenchSettings, LoadSettings, WorkloadOptions
from drafter.engine.options import RunOptions
from drafter.utils.options import LineOptions, Options, part_of
from drafter.utils.validate import within

if TYPE_CHECKING:
    from drafter.bench.models import BenchModels
    from drafter.bench.workload import Workload

_LARGEST_SWEPT_TREE = 64


@dataclass(frozen=True, kw_only=True)
class ResultOptions:
    """The output of results.

    Attributes:
        out: results file (.jsonl)
        report: also write the table and the pictures to this folder
        overwrite: replace a report.md that no earlier run wrote
        wandb: Weights & Biases project to log the table and the results file to; offline where no key is configured
    """

    out: Path
    report: Path | None = None
    overwrite: bool = False
    wandb: str | None = None


@dataclass(frozen=True, kw_only=True)
class BenchOptions(BenchSettings, ResultOptions):
    """Measure methods against each other on the same prompts.

    Methods take turns, round after round. Each run is appended to --out when it is done; runs in --out are not
    repeated. The table is printed at the end.

    Methods: none, drafter, lookup, draft-model (ours); hf-generate, hf-static,
    hf-compile, hf-lookup, hf-assistant (transformers); llama-cpp, openvino-genai (engines of their own, installed with
    the extra `peers`). Options follow a colon: drafter:W8:L4:N24, llama-cpp:Q4_1, openvino-genai:lookup,
    drafter:final-beams, drafter:tuned, draft-model:G5, hf-lookup:G10.
    """

    sections: ClassVar = {**BenchSettings.sections, "Output": ResultOptions}
    common: ClassVar = ("target", "drafter", "prompts", "methods", "out", "report", "num_prompts", "batch_sizes")


def bench(options: BenchOptions) -> None:
    """Run `drafter bench`."""
    _check_out(options.out)
    _check_report(options.report, options.overwrite)
    if _measure([options], options.out):
        _show(options.out, options.report)
        _log(options, options.wandb)


@dataclass(frozen=True, kw_only=True)
class ReportOptions(Options):
    """Make tables and pictures of results.

    The same results give the same table, byte for byte.

    Attributes:
        results: files of `drafter bench`
        out: folder for report.md and the pictures (PNG and SVG); the table is printed if no folder is given
        overwrite: replace a report.md that no earlier run wrote
    """

    common: ClassVar = ("results", "out")
    positional: ClassVar = "results"
    results: tuple[Path, ...]
    out: Path | None = None
    overwrite: bool = False


def bench_report(options: ReportOptions) -> None:
    """Run `drafter bench report`."""
    from drafter.bench.report import report as make_report
    from drafter.bench.results import read_results

    records = read_results(list(options.results))
    _check_report(options.out, options.overwrite)
    if options.out is None:
        print(make_report(records))
    else:
        _write_report(records, options.out)


@dataclass(frozen=True, kw_only=True)
class ShapeOptions:
    """The tree shapes.

    Attributes:
        drafter: folder of an exported drafter
        batch_sizes: prompts that are answered at the same time
        beam_widths: W
        draft_lengths: L
        tree_sizes: N; sizes that W and L cannot draft are left out (default: all nodes that W and L draft, at most 64)
        tree_policy: keep the best nodes of all drafting steps, or only the final beams
        rounds: how often every combination runs
        temperature: 0 is greedy
    """

    drafter: tuple[str, ...]
    batch_sizes: tuple[int, ...] = within((1, 2, 4, 8, 20, 40, 80), low=1, high=1024)
    beam_widths: tuple[int, ...] = within((1, 2, 4, 8, 16, 32, 64), low=1, high=256)
    draft_lengths: tuple[int, ...] = within((4,), low=1, high=32)
    tree_sizes: tuple[int, ...] = within((), low=1, high=1024)
    tree_policy: Literal["all-nodes", "final-beams"] = "all-nodes"
    rounds: int = within(1, low=1)
    temperature: float = within(0.0, low=0.0)


@dataclass(frozen=True, kw_only=True)
class SweepOptions(Options, ShapeOptions, WorkloadOptions, RunOptions, ResultOptions):
    """Measure the drafter's speed over batch sizes and tree shapes.

    Every combination runs beside plain decoding at the same batch size. With --drafter twice, two drafters are
    compared, such as a drafter trained with distillation and a drafter trained without.
    """

    sections: ClassVar = {
        "What to compare": ShapeOptions,
        "What to answer": WorkloadOptions,
        "Where to run": RunOptions,
        "Output": ResultOptions,
    }
    common: ClassVar = ("target", "drafter", "prompts", "out", "batch_sizes", "beam_widths", "tree_sizes")
    num_turns: int | None = 1


def bench_sweep(options: SweepOptions) -> None:
    """Run `drafter bench sweep`."""
    shapes = sweep_methods(options.beam_widths, options.draft_lengths, options.tree_sizes, options.tree_policy)
    first = BenchSettings(
        **vars(part_of(options, WorkloadOptions)),
        **vars(part_of(options, RunOptions)),
        drafter=options.drafter[0],
        methods=("none", *shapes),
        batch_sizes=options.batch_sizes,
        temperatures=(options.temperature,),
        rounds=options.rounds,
    )
    _check_out(options.out)
    _check_report(options.report, options.overwrite)
    _measure([replace(first, drafter=name) for name in options.drafter], options.out)
    _show(options.out, options.report)
    _log(options, options.wandb)


def sweep_methods(
    widths: tuple[int, ...], lengths: tuple[int, ...], sizes: tuple[int, ...], policy: str
) -> tuple[str, ...]:
    """The written form of every combination.

    Raises:
        ValueError: no combination is left.
    """
    found = []
    for width in widths:
        for length in lengths:
            largest = 1 + width * length
            if policy == "final-beams":
                found.append(f"drafter:W{width}:L{length}:final-beams")
                continue
            fitting = [size for size in sizes if size <= largest] if sizes else [min(largest, _LARGEST_SWEPT_TREE)]
            found += [f"drafter:W{width}:L{length}:N{size}" for size in fitting]
    if not found:
        raise ValueError(
            "--tree-sizes are all larger than --beam-widths and --draft-lengths can draft: lower them or leave them out"
        )
    return tuple(dict.fromkeys(found))


@dataclass(frozen=True, kw_only=True)
class LoadOptions(Options, LineOptions, LoadSettings):
    """Put load on a server that speaks OpenAI's protocol.

    Measures throughput, the time to the first token and the time per token. The key of OPENAI_API_KEY is sent if set.

    Attributes:
        prompts: file of prompts, hub data set, or mtbench, specbench, humaneval, gsm8k
        out: results file (.jsonl); each level of load is appended when it ends
        concurrency: levels of load: requests at the same time (default: 1,4,16)
        rate: levels of load: requests per second on average, arriving at random
        raw: send prompts as plain text, without chat template
    """

    common: ClassVar = ("url", "prompts", "out", "concurrency", "rate", "num_requests", "max_new_tokens")
    prompts: str
    out: Path | None = None
    concurrency: tuple[int, ...] = within((), low=1)
    rate: tuple[float, ...] = within((), above=0.0)
    raw: bool = False


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
    print(load_table(run_load(options, read_prompt_set(options.prompts, raw=options.raw), levels, keep)))


def _check_report(folder: Path | None, overwrite: bool) -> None:
    """Refuse to replace a report.md that no earlier run wrote."""
    from drafter.bench.report import is_report
    from drafter.utils.io import check_output

    if folder is not None:
        check_output(folder / "report.md", overwrite=overwrite, is_ours=is_report)


def _check_out(out: Path) -> None:
    from drafter.bench.results import resume_results
    from drafter.utils.io import check_output

    if out.suffix != ".jsonl":
        raise ValueError(f"--out {out} must be a file NAME.jsonl")
    check_output(out, overwrite=True)  # results are appended
    resume_results(out)  # results of another schema are refused before anything is loaded


def _measure(every: list[BenchSettings], out: Path) -> bool:
    """Measure settings that differ only in the drafter; True in the leading process."""
    from drafter.bench.run import run_benchmark
    from drafter.bench.workload import read_prompt_set
    from drafter.engine.follow import lead_or_follow
    from drafter.engine.options import Models

    first = every[0]
    workloads: list[Workload] = [
        read_prompt_set(name, raw=first.raw).take(first.num_prompts).first_turns(first.num_turns)
        for name in first.prompts
    ]
    models = _load_models(first)
    for settings in every:
        loaded = _with_drafter(models, settings)
        work = partial(run_benchmark, settings, loaded, workloads, out)
        made = lead_or_follow(Models(loaded.target, loaded.drafter, loaded.draft_model), work)
        if made is None:
            return False
        print(f"{made} runs made, results in {out}", file=sys.stderr)
    return True


def _load_models(settings: BenchSettings) -> "BenchModels":
    """The models of a benchmark, without its drafter."""
    from drafter.bench.models import BenchModels

    target = settings.load()
    peer_target, draft_model = None, None
    if target.is_packed and any(spec.is_peer and not spec.is_native for spec in settings.specs):
        peer_target = settings.load(pack=False)  # transformers' own methods run on the model as transformers loads it
    if any(spec.needs_draft_model for spec in settings.specs):
        assert settings.draft_model is not None
        draft_model = settings.load(settings.draft_model, pack=False)
    return BenchModels(target, None, "", draft_model, settings.tuned, settings.compile, peer_target)


def _with_drafter(models: "BenchModels", settings: BenchSettings) -> "BenchModels":
    """The models with the drafter of the settings, if a method needs a drafter."""
    from drafter.engine.loading import load_drafter

    if not any(spec.needs_drafter for spec in settings.specs):
        return models
    assert settings.drafter is not None
    return models._replace(drafter=load_drafter(settings.drafter, models.target), drafter_name=settings.drafter)


def _show(out: Path, folder: Path | None) -> None:
    from drafter.bench.report import report as make_report
    from drafter.bench.results import read_results

    records = read_results([out])
    print(make_report(records))
    if folder is not None:
        _write_report(records, folder)


def _log(options: BenchOptions | SweepOptions, project: str | None) -> None:
    """Log summaries and results file as one Weights & Biases run, where ``--wandb`` names a project."""
    if project is None:
        return
    from drafter.bench.results import read_results, summarise
    from drafter.integrations.wandb import log_results
    from drafter.utils.provenance import run_record

    tables = summarise(read_results([options.out]))
    rows = [condition._asdict() | asdict(summary) for condition, summaries in tables.items() for summary in summaries]
    record = run_record(settings=asdict(options))
    log_results(project, options.out.parent, record=record, rows=rows, files=[options.out])


def _write_report(records: list[dict[str, Any]], folder: Path) -> None:
    from drafter.bench.plots import draw_all
    from drafter.bench.report import report as make_report
    from drafter.bench.results import summarise
    from drafter.utils.io import write_atomic

    write_atomic(folder / "report.md", make_report(records))
    drawn = draw_all(summarise(records), folder)
    print(f"{folder / 'report.md'} and {len(drawn)} pictures (PNG and SVG)", file=sys.stderr)
