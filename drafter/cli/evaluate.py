"""`drafter evaluate`: acceptance by depth and by category, here and as a running server reports it."""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from drafter.bench.methods import parse_method
from drafter.engine.loading import TargetConfig
from drafter.utils.options import Options
from drafter.utils.validate import within

if TYPE_CHECKING:
    from drafter.bench.acceptance import Acceptance, Served
    from drafter.bench.models import BenchModels
    from drafter.bench.workload import Workload
    from drafter.decoding.params import SamplingParams

_NUM_COMPARED = 4  # prompts whose greedy answers are compared with the target


@dataclass(frozen=True, kw_only=True)
class AskedOptions:
    """What is measured.

    Attributes:
        drafter: folder of an exported drafter, or name of a drafter that comes with the package
        method: how tokens are drafted, in the written form of `drafter bench`, such as drafter:W4:L3:N8 or lookup
        prompts: file of prompts, hub data set, or a name: evaluation, default, mtbench, humaneval, gsm8k
        num_prompts: largest number of prompts, all categories alike
        max_new_tokens: longest answer in tokens
        temperature: 0 is greedy
        url: address of a running server with OpenAI's protocol (ours or vLLM) that is measured too
        model: name of the model on the server (default: the first model that the server lists)
        out: results file (.json)
    """

    drafter: str | None = None
    method: str = "drafter"
    prompts: str = "evaluation"
    num_prompts: int | None = within(None, low=1)
    max_new_tokens: int = within(128, low=1, high=2**24)
    temperature: float = within(0.0, low=0.0)
    url: str | None = None
    model: str | None = None
    out: Path | None = None


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(Options, AskedOptions, TargetConfig):
    """Measure how many drafted tokens are accepted: by depth and category, here and on a server.

    With --url, the same prompts go to the server. If the server accepts far less than this machine, the command warns,
    names what differs (chat template, special tokens, dtype or quantisation, sampling, context length, speculation
    off) and returns exit code 1.
    """

    sections: ClassVar = {"What to measure": AskedOptions, "Where to run": TargetConfig}
    common: ClassVar = ("target", "drafter", "method", "prompts", "url", "out", "num_prompts", "max_new_tokens")

    def __post_init__(self) -> None:
        super().__post_init__()
        spec = parse_method(self.method)
        if spec.is_peer or spec.needs_draft_model:
            raise ValueError(f"--method {self.method}: evaluate measures none, drafter or lookup")
        if spec.needs_drafter and self.drafter is None:
            raise ValueError(f"--method {self.method} needs a drafter: give --drafter DIR")


def evaluate(options: EvaluateOptions) -> int:
    """Run `drafter evaluate`; 1 when the server accepts far less than this machine."""
    from tqdm import tqdm

    from drafter.bench.acceptance import add_all, measure_here, measure_server, warning_lines
    from drafter.bench.models import BenchModels
    from drafter.bench.workload import read_prompt_set
    from drafter.decoding.params import SamplingParams
    from drafter.distill.client import Client
    from drafter.distill.same_model import compare_models
    from drafter.engine.loading import load_drafter
    from drafter.utils.io import check_output

    if options.out is not None:
        check_output(options.out, overwrite=True)
    workload = read_prompt_set(options.prompts).take(options.num_prompts).first_turns(1)
    client = card = None
    if options.url is not None:
        client = Client(options.url, flag="--url")
        card = client.model_card(options.model)  # a wrong address is known before the models are loaded
    spec = parse_method(options.method)
    target = options.load()
    drafter = load_drafter(options.drafter, target) if options.drafter is not None and spec.needs_drafter else None
    models = BenchModels(target, drafter, options.drafter or "")
    params = SamplingParams(max_new_tokens=options.max_new_tokens, temperature=options.temperature)
    served, differences, warning = None, [], []
    with tqdm(total=len(workload.items) * (1 if client is None else 2), unit="answer", disable=None) as bar:

        def on_answer() -> None:
            bar.update()

        here = measure_here(models, models.backend(spec, 1), workload, params, on_answer)
        if client is not None and card is not None:
            served = measure_server(client, card, workload, params, on_answer)
            chats = [item.messages([]) for item in workload.items if not item.is_raw]
            differences = compare_models(client, str(card["id"]), target, chats[:_NUM_COMPARED]).lines()
            warning = warning_lines(add_all(here.values()), served, differences)
    print("\n".join(_tables(here, served)))
    if options.out is not None:
        _write(options, models, params, workload, here, served, differences)
    for line in warning or differences:
        print(line, file=sys.stderr)
    return 1 if warning else 0


def _tables(here: "dict[str, Acceptance]", served: "Served | None") -> list[str]:
    """Shares by depth, and accepted tokens per step by category."""
    from drafter.bench.acceptance import add_all
    from drafter.utils.tables import format_table

    whole = add_all(here.values())
    sources = [whole.shares] + ([served.whole.shares] if served is not None else [])
    depths = [
        [str(depth + 1), *(f"{shares[depth]:.0%}" if depth < len(shares) else "0%" for shares in sources)]
        for depth in range(max(map(len, sources)))
    ]
    columns = ["here", *(["server"] if served is not None else [])]
    lines = ["Share of the steps that accepted a drafted token at this depth:", ""]
    lines += [format_table(["depth", *columns], depths), "", "Accepted drafted tokens per step:", ""]
    parts = served.by_category if served is not None else {}
    rows = [_row(name or "all", counts, parts.get(name), served) for name, counts in here.items()]
    if len(here) > 1:
        rows.append(_row("all", whole, served.whole if served is not None else None, served))
    return [*lines, format_table(["category", "answers", "steps", *columns], rows)]


def _row(name: str, here: "Acceptance", there: "Acceptance | None", served: "Served | None") -> Sequence[str]:
    row = [name, str(here.num_answers), str(here.num_steps), f"{here.accepted_per_step:.2f}"]
    if served is not None:
        row.append("-" if there is None else f"{there.accepted_per_step:.2f}")
    return row


def _write(
    options: EvaluateOptions,
    models: "BenchModels",
    params: "SamplingParams",
    workload: "Workload",
    here: "dict[str, Acceptance]",
    served: "Served | None",
    differences: Sequence[str],
) -> None:
    import json

    from drafter.utils.io import write_atomic
    from drafter.utils.provenance import run_record

    assert options.out is not None
    content: dict[str, Any] = {
        "schema": "drafter-evaluate/2",
        "target": {"name": models.target.name, "fingerprint": models.target.fingerprint},
        "drafter": models.drafter_name or None,
        "method": options.method,
        "prompts": {"name": workload.name, "digest": workload.digest},
        "max_new_tokens": params.max_new_tokens,
        "temperature": params.temperature,
        "url": options.url,
        "here": {name: asdict(counts) for name, counts in here.items()},
        "server": None if served is None else asdict(served),
        "differences": list(differences),
        **run_record(seed=params.seed),
    }
    write_atomic(options.out, json.dumps(content, indent=2) + "\n")
