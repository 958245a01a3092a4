"""The commands of this room: `drafter bench`, `bench report`, `bench sweep`, `bench serve`. Wiring only."""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from drafter.bench.settings import BenchSettings, merge_settings

if TYPE_CHECKING:
    from drafter.bench.arena import Arena
    from drafter.bench.workload import Workload

_LARGEST_SWEPT_TREE = 64


def bench(
    *,
    out: Path,
    config: Path | None = None,
    target: str | None = None,
    drafter: str | None = None,
    draft_model: str | None = None,
    tuned: str | None = None,
    prompts: list[str] | None = None,
    methods: tuple[str, ...] | None = None,
    batch_sizes: tuple[int, ...] | None = None,
    temperatures: tuple[float, ...] | None = None,
    num_prompts: int | None = None,
    num_turns: int | None = None,
    max_new_tokens: int | None = None,
    rounds: int | None = None,
    seed: int | None = None,
    dtype: Literal["auto", "float32", "bfloat16", "float16"] | None = None,
    device: str | None = None,
    raw: bool = False,
    ignore_eos: bool = False,
    compile: bool | None = None,
    report: Path | None = None,
) -> None:
    """Measure methods against each other on the same prompts.

    Methods take turns, round after round; each run is appended to --out when it is done, and runs that are there
    already are not repeated. The table is printed at the end. Settings come from the file of --config, flags go first.

    Methods: autoregressive, redrafter, hybrid, recycling, lookup, draft-model (ours); hf-generate, hf-static,
    hf-compile, hf-lookup, hf-assistant (transformers); llama-cpp, openvino-genai (engines of their own, installed with
    the extra `peers`). Options follow a colon: redrafter:W8:L4:N24, llama-cpp:Q4_1, openvino-genai:lookup,
    redrafter:final-beams, redrafter:tuned, hybrid:tuned, draft-model:G5, hf-lookup:G10.

    Args:
        out: results file (.jsonl)
        config: settings (.yaml), such as configs/bench/smollm2-135m-cpu.yaml
        target: alias, hub id, folder or .gguf file of the language model
        drafter: folder of an exported drafter
        draft_model: smaller model of the same family, for draft-model and hf-assistant
        tuned: file of `drafter tune` for the method that is tuned (default: the drafter's own)
        prompts: file of prompts, hub data set, or mtbench, specbench, humaneval, gsm8k; may be repeated
        methods: what is compared (default: autoregressive,redrafter,lookup,hf-generate)
        batch_sizes: prompts answered at the same time (default: 1)
        temperatures: 0 is greedy (default: 0)
        num_prompts: at most so many prompts of each set, all categories alike
        num_turns: at most so many turns of each conversation
        max_new_tokens: longest answer in tokens (default: 128)
        rounds: how often every method runs (default: 3)
        seed: of sampling (default: 0)
        dtype: number format of the models (default: auto, which is bfloat16 on CUDA and else float32)
        device: auto, cpu, cuda or cuda:1 (default: auto)
        raw: give prompts to the model as they are, without chat template
        ignore_eos: go on after the model's own stop token
        compile: compile our own engine's steps (default: on CUDA only)
        report: also write the table and the pictures to this folder
    """
    settings = merge_settings(
        config,
        {
            "target": target, "drafter": drafter, "draft_model": draft_model, "tuned": tuned,
            "prompts": tuple(prompts) if prompts else None, "methods": methods, "batch_sizes": batch_sizes,
            "temperatures": temperatures, "num_prompts": num_prompts, "num_turns": num_turns,
            "max_new_tokens": max_new_tokens,
            "rounds": rounds, "seed": seed, "dtype": dtype, "device": device, "raw": raw or None,
            "ignore_eos": ignore_eos or None, "compile": compile,
        },
    )  # fmt: skip
    _check_out(out)
    _measure([settings], out)
    _show(out, report)


def bench_report(results: list[Path], *, out: Path | None = None) -> None:
    """Make tables and pictures of results.

    The same results give the same table, byte for byte.

    Args:
        results: files that `drafter bench` wrote
        out: folder for report.md and the pictures (PNG and SVG); without it the table is printed
    """
    from drafter.bench.records import read_records
    from drafter.bench.report import report as make_report

    records = read_records(results)
    if out is None:
        print(make_report(records))
    else:
        _write_report(records, out)


def bench_sweep(
    *,
    target: str,
    drafter: list[str],
    prompts: list[str],
    out: Path,
    batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 20, 40, 80),
    beam_widths: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64),
    draft_lengths: tuple[int, ...] = (4,),
    tree_sizes: tuple[int, ...] = (),
    tree_policy: Literal["all-nodes", "final-beams"] = "all-nodes",
    num_prompts: int | None = None,
    num_turns: int = 1,
    max_new_tokens: int = 128,
    rounds: int = 1,
    temperature: float = 0.0,
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
    device: str = "auto",
    compile: bool | None = None,
    report: Path | None = None,
) -> None:
    """Measure the drafter's speed over batch sizes and tree shapes.

    Every combination runs beside plain decoding at the same batch size. With --drafter twice, two drafters are
    compared, such as one trained with distillation and one without.

    Args:
        target: alias, hub id, folder or .gguf file of the language model
        drafter: folder of an exported drafter; may be repeated
        prompts: file of prompts, hub data set, or mtbench, specbench, humaneval, gsm8k; may be repeated
        out: results file (.jsonl)
        batch_sizes: prompts answered at the same time
        beam_widths: W
        draft_lengths: L
        tree_sizes: N; those larger than W and L can draft are left out (without: all that they draft, at most 64)
        tree_policy: keep the best nodes of all drafting steps, or only the final beams
        num_prompts: at most so many prompts of each set, all categories alike
        num_turns: at most so many turns of each conversation
        max_new_tokens: longest answer in tokens
        rounds: how often every combination runs
        temperature: 0 is greedy
        dtype: number format of the model
        device: auto, cpu, cuda or cuda:1
        compile: compile the steps (default: on CUDA only)
        report: also write the table and the pictures to this folder
    """
    methods = ("autoregressive", *sweep_methods(beam_widths, draft_lengths, tree_sizes, tree_policy))
    first = BenchSettings(
        target=target, prompts=tuple(prompts), drafter=drafter[0], methods=methods, batch_sizes=batch_sizes,
        temperatures=(temperature,), num_prompts=num_prompts, num_turns=num_turns, max_new_tokens=max_new_tokens,
        rounds=rounds, dtype=dtype, device=device, compile=compile,
    )  # fmt: skip
    _check_out(out)
    _measure([replace(first, drafter=name) for name in drafter], out)
    _show(out, report)


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
                found.append(f"redrafter:W{width}:L{length}:final-beams")
                continue
            fitting = [size for size in sizes if size <= largest] if sizes else [min(largest, _LARGEST_SWEPT_TREE)]
            found += [f"redrafter:W{width}:L{length}:N{size}" for size in fitting]
    if not found:
        raise ValueError(
            "--tree-sizes are all larger than --beam-widths and --draft-lengths can draft: lower them or leave them out"
        )
    return tuple(dict.fromkeys(found))


def bench_serve(
    *,
    url: str,
    prompts: str,
    out: Path | None = None,
    concurrency: tuple[int, ...] = (),
    rate: tuple[float, ...] = (),
    model: str = "",
    num_requests: int = 64,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    seed: int = 0,
    raw: bool = False,
) -> None:
    """Put load on a server that speaks OpenAI's protocol.

    Measures throughput, the time to the first token and the time per token. Each stretch of load is appended to --out
    when it ends. The key of OPENAI_API_KEY is sent if set.

    Args:
        url: address of the server, such as http://localhost:8000
        prompts: file of prompts, hub data set, or mtbench, specbench, humaneval, gsm8k
        out: results file (.jsonl) to append to
        concurrency: requests under way at the same time, one stretch of load for each number (default: 1,4,16)
        rate: requests per second on average, arriving at random; one stretch of load for each number
        model: name of the model on the server (default: the first that it lists)
        num_requests: requests of each stretch
        max_new_tokens: longest answer in tokens
        temperature: 0 is greedy
        seed: of arrivals and sampling
        raw: send prompts as plain text, without chat template
    """
    from drafter.bench.load import LoadSettings, Stretch, run_load
    from drafter.bench.prompt_sets import read_prompt_set
    from drafter.bench.records import append_record
    from drafter.bench.report import load_table

    stretches = [*(Stretch(concurrency=number) for number in concurrency), *(Stretch(rate=number) for number in rate)]
    stretches = stretches or [Stretch(concurrency=number) for number in (1, 4, 16)]
    settings = LoadSettings(url, model, num_requests, max_new_tokens, temperature, seed)
    if out is not None:
        _check_out(out)
    keep = partial(append_record, out) if out is not None else None
    print(load_table(run_load(settings, read_prompt_set(prompts, raw=raw), stretches, keep)))


def _check_out(out: Path) -> None:
    from drafter.bench.records import resume_records
    from drafter.utils.io import check_writable

    if out.suffix != ".jsonl":
        raise ValueError(f"--out {out} must be a file NAME.jsonl")
    check_writable(out)
    resume_records(out)  # results of another schema are refused before anything is loaded


def _measure(every: list[BenchSettings], out: Path) -> None:
    """All settings share target and prompts; they differ in the drafter."""
    from drafter.bench.prompt_sets import read_prompt_set
    from drafter.bench.run import run_benchmark

    first = every[0]
    workloads: list[Workload] = [
        read_prompt_set(name, raw=first.raw).take(first.num_prompts).first_turns(first.num_turns)
        for name in first.prompts
    ]
    arena = load_arena(first)
    for settings in every:
        made = run_benchmark(settings, with_drafter(arena, settings), workloads, out)
        print(f"{made} runs made, results in {out}", file=sys.stderr)


def load_arena(settings: BenchSettings) -> "Arena":
    """The models of a benchmark, without its drafter."""
    from drafter.bench.arena import Arena
    from drafter.engine.loading import load_target

    load = partial(load_target, dtype=settings.dtype, device=settings.device)
    target = load(settings.target, pack=not settings.compile)
    peer_target, draft_model = None, None
    if target.is_packed and any(spec.is_peer for spec in settings.specs):
        peer_target = load(settings.target, pack=False)  # peers run on the model as transformers loads it
    if any(spec.needs_draft_model for spec in settings.specs):
        assert settings.draft_model is not None
        draft_model = load(settings.draft_model, pack=False)
    return Arena(target, None, "", draft_model, settings.tuned, settings.compile, peer_target)


def with_drafter(arena: "Arena", settings: BenchSettings) -> "Arena":
    """The arena and the drafter of the settings, if a method needs one."""
    from drafter.engine.loading import load_drafter

    if not any(spec.needs_drafter for spec in settings.specs):
        return arena
    assert settings.drafter is not None
    return arena._replace(drafter=load_drafter(settings.drafter, arena.target), drafter_name=settings.drafter)


def _show(out: Path, folder: Path | None) -> None:
    from drafter.bench.records import read_records
    from drafter.bench.report import report as make_report

    records = read_records([out])
    print(make_report(records))
    if folder is not None:
        _write_report(records, folder)


def _write_report(records: list[dict[str, Any]], folder: Path) -> None:
    from drafter.bench.plots import draw_all
    from drafter.bench.report import report as make_report
    from drafter.bench.summary import summarise
    from drafter.utils.io import write_atomic

    write_atomic(folder / "report.md", make_report(records))
    drawn = draw_all(summarise(records), folder)
    print(f"{folder / 'report.md'} and {len(drawn)} pictures (PNG and SVG)", file=sys.stderr)
