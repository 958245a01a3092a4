"""`drafter evaluate`: acceptance by depth and by category, offline and as a running server reports it."""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from drafter.engine.options import DraftingOptions, ParallelOptions, load_models
from drafter.utils.options import LineOptions, Options
from drafter.utils.validate import seed_field, within

if TYPE_CHECKING:
    from drafter.bench.acceptance import Acceptance, Served
    from drafter.bench.causes import Cause
    from drafter.bench.models import BenchModels
    from drafter.bench.workload import Workload

_NUM_COMPARED = 4  # prompts whose greedy answers are compared with the target


@dataclass(frozen=True, kw_only=True)
class AskedOptions(LineOptions):
    """The prompts, and the length of answers.

    Attributes:
        prompts: file of prompts, hub data set, or mtbench, specbench, humaneval, gsm8k
        num_prompts: largest number of prompts, all categories alike
        max_new_tokens: longest answer in tokens
        temperature: 0 is greedy
        seed: seed of sampling
        raw: give the prompts to the model without chat template
    """

    prompts: str
    num_prompts: int | None = within(None, low=1)
    max_new_tokens: int = within(128, low=1, high=2**24)
    temperature: float = within(0.0, low=0.0)
    seed: int = seed_field()
    raw: bool = False


@dataclass(frozen=True, kw_only=True)
class ServedOptions:
    """The server that is measured too.

    Attributes:
        url: address of a running server with OpenAI's protocol: ours, vLLM or SGLang
        model: name of the model on the server (default: the first model that the server lists)
        concurrency: requests at the same time
    """

    url: str | None = None
    model: str | None = None
    concurrency: int = within(1, low=1)


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(Options, AskedOptions, ServedOptions, DraftingOptions):
    """Measure how many drafted tokens are accepted: by depth and category, here and on a server.

    With --url, the same prompts go to the server. If the server accepts far less than this machine, the command warns
    and returns exit code 1. The usual causes are tested one by one: chat template, special tokens, dtype or
    quantisation, context length, sampling parameters, speculation off.

    Attributes:
        out: results file (.json)
    """

    sections: ClassVar = {
        "What to answer": AskedOptions,
        "Server to compare with": ServedOptions,
        "Where to run": ParallelOptions,
        "How to draft": DraftingOptions,
    }
    common: ClassVar = ("target", "drafter", "prompts", "url", "out", "num_prompts", "max_new_tokens", "temperature")
    out: Path | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tensor_parallel > 1:
            raise ValueError(f"--tensor-parallel {self.tensor_parallel}: evaluate runs in one process, leave it out")


def evaluate(options: EvaluateOptions) -> int:
    """Run `drafter evaluate`; 1 when the server accepts far less than this machine."""
    from tqdm import tqdm

    from drafter.bench.acceptance import measure_offline, measure_server
    from drafter.bench.backends import EngineBackend
    from drafter.bench.causes import find_causes
    from drafter.bench.models import BenchModels
    from drafter.bench.workload import read_prompt_set
    from drafter.decoding.params import SamplingParams
    from drafter.distill.client import Client
    from drafter.distill.same_model import compare_models
    from drafter.engine.engine import Engine
    from drafter.utils.io import check_output

    if options.out is not None:
        check_output(options.out, overwrite=True)
    workload = read_prompt_set(options.prompts, raw=options.raw).take(options.num_prompts).first_turns(1)
    client = card = None
    if options.url is not None:
        client = Client(options.url, flag="--url")
        card = client.model_card(options.model)  # a wrong address is known before the models are loaded
    loaded = load_models(options)
    choice = loaded.choose(options, max_num_seqs=1)
    print(f"drafting: {choice.reason}", file=sys.stderr)
    models = BenchModels(loaded.target, loaded.drafter, options.drafter_used or "", loaded.draft_model)
    engine = Engine(loaded.target, loaded.drafter, choice.config, draft_model=loaded.draft_model)
    params = SamplingParams(max_new_tokens=options.max_new_tokens, temperature=options.temperature, seed=options.seed)
    num_asked = len(workload.items) * (1 if client is None else 2)
    with tqdm(total=num_asked, desc="answering", unit="answer", file=sys.stderr, disable=None) as bar:

        def on_answer() -> None:
            bar.update()

        offline = measure_offline(models, EngineBackend(engine), workload, params, on_answer)
        result = _Result(options, workload, offline, choice.config.method)
        if client is not None and card is not None:
            result.served = measure_server(client, card, workload, params, options.concurrency, on_answer)
            chats = [item.messages([]) for item in workload.items if not item.is_raw]
            compared = compare_models(client, str(card["id"]), models.target, chats[:_NUM_COMPARED])
            num_needed = models.longest(workload, options.max_new_tokens)
            result.causes = find_causes(compared, card, result.served, num_needed)
    print("\n".join(result.lines()))
    if options.out is not None:
        _write(result, models, options.out)
    for line in result.warnings():
        print(line, file=sys.stderr)
    return 1 if result.warnings() else 0


@dataclass
class _Result:
    """All measurements of a run."""

    options: EvaluateOptions
    workload: "Workload"
    offline: "dict[str, Acceptance]"
    method: str
    served: "Served | None" = None
    causes: "Sequence[Cause]" = ()

    def lines(self) -> list[str]:
        """The tables."""
        from drafter.bench.acceptance import shares_table, total
        from drafter.utils.tables import format_table

        parts = self.served.by_category if self.served is not None else {}
        offline, served = total(self.offline), total(parts) if self.served is not None else None
        columns = ["depth", "offline", *(["server"] if served is not None else [])]
        lines = ["Share of the steps that accepted a drafted token at this depth:", ""]
        lines += [format_table(columns, shares_table(offline, served)), "", "Accepted drafted tokens per step:", ""]
        rows = [(name or "all", *_figures(part, parts.get(name))) for name, part in self.offline.items()]
        if len(self.offline) > 1:
            rows.append(("all", *_figures(offline, served)))
        columns = ["category", "answers", "steps", "offline", "server", "server / offline"]
        width = len(columns) if served is not None else 4
        lines.append(format_table(columns[:width], [row[:width] for row in rows]))
        if self.causes:
            lines += ["", "Usual causes of a difference:", ""]
            lines += [f"{cause.name:<22} {cause.verdict:<8} {cause.seen}" for cause in self.causes]
        return lines

    def warnings(self) -> list[str]:
        """Lines of the warning, if there is one."""
        from drafter.bench.acceptance import total
        from drafter.bench.causes import warning_lines

        if self.served is None or self.served.source == "none":
            return []
        return warning_lines(total(self.offline), total(self.served.by_category), self.causes)


def _figures(offline: "Acceptance", served: "Acceptance | None") -> tuple[str, ...]:
    mine = offline.accepted_per_step
    figures = (str(offline.num_answers), str(offline.num_steps), f"{mine:.2f}")
    if served is None:
        return (*figures, "-", "-")
    theirs = served.accepted_per_step
    return (*figures, f"{theirs:.2f}", f"{theirs / mine:.0%}" if mine else "-")


def _write(result: _Result, models: "BenchModels", out: Path) -> None:
    import json

    from drafter.utils.io import write_atomic
    from drafter.utils.provenance import run_record

    options, served = result.options, result.served
    content = {
        "schema": "drafter-evaluate/1",
        "target": {"name": models.target.name, "fingerprint": models.target.fingerprint},
        "drafter": models.drafter_name or None,
        "method": result.method,
        "prompts": {"name": result.workload.name, "digest": result.workload.digest},
        **{name: getattr(options, name) for name in ("max_new_tokens", "temperature", "seed", "url")},
        "offline": {name: asdict(part) for name, part in result.offline.items()},
        "server": None if served is None else asdict(served),
        "causes": [cause._asdict() for cause in result.causes],
        "warning": result.warnings(),
        **run_record(seed=options.seed),
    }
    write_atomic(out, json.dumps(content, indent=2) + "\n")
