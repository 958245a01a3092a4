"""`drafter distill`: the target answers prompts, as training data for its drafter."""

import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from drafter.cli.data import RowOptions
from drafter.distill.prompts import AnswerSettings
from drafter.distill.ray_answers import ClusterOptions, RayAnswerer
from drafter.engine.settings import EngineOptions
from drafter.utils.options import Options, part_of
from drafter.utils.validate import within

if TYPE_CHECKING:
    from drafter.distill.run import Answerer, EngineAnswerer


@dataclass(frozen=True, kw_only=True)
class DistillOptions(Options, RowOptions, AnswerSettings, EngineOptions, ClusterOptions):
    """Let the target answer prompts: training data for its drafter.

    Answers are appended to --out as they are finished; the same command continues a run that was interrupted.

    Attributes:
        prompts: file of prompts (`text` rows get no chat template), hub data set, or magpie: the target invents prompts
            (default: about 100 prompts that come with the package)
        num_prompts: largest number of prompts; for magpie: prompts to invent before the first answer
        exclude: file of prompts that must not be answered, such as the prompts of an evaluation
        out: .jsonl file of the answers
        endpoint: address of an OpenAI-compatible server that serves the target and answers instead of this machine;
            with --target, a few greedy answers of the server are compared with the target first
        model: name of the target on that server; the key is read from OPENAI_API_KEY
        concurrency: requests at the same time
        states: folder for the hidden states that answering computes, which `drafter train --data.cache_hidden_states`
            then reads instead of running the target
        context_layers: layers whose states are kept too, for a drafter that reads these
        max_num_seqs: prompts that are answered at the same time
        enable_prefix_caching: compute the tokens that several prompts begin with only once
    """

    common: ClassVar = (
        "target", "prompts", "num_prompts", "out", "max_new_tokens", "temperature", "drafter", "max_num_seqs",
        "endpoint", "model",
    )  # fmt: skip
    rare: ClassVar = (
        *AnswerSettings.rare, "compile", "device_map", "revision", "trust_remote_code", "beam_width", "draft_length",
        "tree_size", "copying", "num_speculative_tokens", "tuned", "max_model_len", "enable_prefix_caching",
        "prefill_chunk", "ray_workers", "ray_gpus", "ray_cpus", "context_layers",
    )  # fmt: skip
    kept: ClassVar = "finished answers are in --out; the same command goes on"
    prompts: str | None = None
    num_prompts: int | None = within(None, low=1)
    exclude: str | None = None
    out: Path
    endpoint: str | None = None
    model: str | None = None
    concurrency: int = within(16, low=1)
    states: Path | None = None
    context_layers: tuple[int, ...] = within((), low=0)
    target: str | None = None  # type: ignore[assignment]
    max_num_seqs: int | None = 64
    enable_prefix_caching: bool | None = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.target is None and self.endpoint is None:
            raise ValueError("no model answers: give --target, or --endpoint with --model")
        if self.endpoint is not None and (self.drafter is not None or self.ray is not None):
            raise ValueError(f"--endpoint {self.endpoint}: the server answers, so leave --drafter and --ray out")
        if self.states is not None and (self.endpoint or self.ray) is not None:
            raise ValueError(f"--states {self.states} needs answers of this machine: leave --endpoint and --ray out")


def distill(options: DistillOptions) -> None:
    """Run `drafter distill`."""
    from drafter.data.formats import read_rows
    from drafter.distill.run import MAGPIE
    from drafter.distill.run import distill as run
    from drafter.utils.provenance import write_run_record

    if options.prompts not in (None, MAGPIE):
        next(read_rows(options.prompts, columns=options.columns), None)  # a missing file is told before models load
    answerer: Answerer
    if options.ray is not None:
        make = partial(engine_answerer, options)
        answerer = RayAnswerer(make, part_of(options, ClusterOptions), options.max_num_seqs or 64)
    elif options.endpoint is not None:
        from drafter.distill.endpoint import Endpoint

        answerer = server = Endpoint(options.endpoint, options.model or "", options.concurrency)
        if options.target is not None:
            from drafter.data.reading import BUILTIN_PROMPTS
            from drafter.distill.prompts import select_prompts
            from drafter.distill.same_model import compare_models

            prompts = [row.messages for row in select_prompts(BUILTIN_PROMPTS, limit=3)[0]]
            print(*compare_models(server, options.load(), prompts), sep="\n", file=sys.stderr)
    else:
        answerer = engine_answerer(options)
    report = run(
        answerer, options.prompts, options.out, part_of(options, AnswerSettings), num_prompts=options.num_prompts,
        columns=options.columns, exclude=options.exclude,
    )  # fmt: skip
    if report.num_new:
        write_run_record(options.out, seed=options.seed, settings=vars(report))
    for line in report.lines():
        print(line)


def engine_answerer(options: DistillOptions) -> "EngineAnswerer":
    """An engine with its own models, as each worker of a cluster has one."""
    from drafter.data.hidden_states import StatesOfAnswers
    from drafter.distill.run import EngineAnswerer
    from drafter.engine.engine import Engine
    from drafter.engine.settings import resolve
    from drafter.targets.catalog import check_chat_template

    check_chat_template(options.target or "", options.revision)
    models, layers = options.load_models(), options.context_layers
    plan, states = resolve(options, *models), None
    if options.states is not None:
        plan = replace(plan, kept_layers=layers)
        states = StatesOfAnswers(options.states.expanduser(), models.target, layers)
    print(f"drafting: {plan.reason}", file=sys.stderr)
    return EngineAnswerer(Engine(models.target, models.drafter, plan, draft_model=models.draft_model), states)
