"""`drafter evaluate`: acceptance by depth and by category, here and as a running server reports it."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drafter.bench.methods import drafter_of, parse_method
from drafter.engine.loading import TargetConfig
from drafter.utils.options import Options
from drafter.utils.validate import within

if TYPE_CHECKING:
    from drafter.bench.acceptance import ByCategory, Served
    from drafter.bench.models import BenchModels

_NUM_COMPARED = 4  # prompts whose greedy answers are compared with the target


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(Options, TargetConfig):
    """Measure how many drafted tokens are accepted: by depth and category, here and on a server.

    With --traffic, drafts are counted along recorded answers. With --url, the prompts go to the server too. If the
    server accepts far less than this machine, the command warns, names what differs (chat template, special tokens,
    dtype or quantisation, sampling, context length, speculation off) and returns exit code 1.

    Attributes:
        drafter: folder of an exported drafter, hub id, or name of a drafter that comes with the package (default: the
            target's own drafter where the package has one)
        method: how tokens are drafted, in the written form of `drafter bench`, such as drafter:W4:L3:N8 or lookup
        prompts: file of prompts, hub data set, folder of `drafter serve --record`, or a name: evaluation, default,
            mtbench, humaneval, gsm8k
        traffic: file or folder of rows of token ids, such as that of `drafter serve --record`; drafts are counted along
            the recorded answers, and no prompt is answered
        num_prompts: largest number of prompts or recorded answers, all categories alike
        max_new_tokens: longest answer in tokens
        temperature: 0 is greedy
        url: address of a running server with OpenAI's protocol (ours or vLLM) that is measured too
        model: name of the model on the server (default: the first model that the server lists)
        out: results file (.json)
    """

    drafter: str | None = None
    method: str = "drafter"
    prompts: str = "evaluation"
    traffic: Path | None = None
    num_prompts: int | None = within(None, low=1)
    max_new_tokens: int = within(128, low=1, high=2**24)
    temperature: float = within(0.0, low=0.0)
    url: str | None = None
    model: str | None = None
    out: Path | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        spec = parse_method(self.method)
        if spec.is_peer or spec.name == "draft-model":
            raise ValueError(f"--method {self.method}: evaluate measures none, drafter or lookup")
        if self.traffic is not None and (self.url is not None or spec.name != "drafter"):
            flag = f"--url {self.url}" if self.url is not None else f"--method {self.method}"
            raise ValueError(f"--traffic {self.traffic} counts a drafter along recorded answers: leave {flag} out")
        drafter_of([spec], self.target, self.drafter)


def evaluate(options: EvaluateOptions) -> int:
    """Run `drafter evaluate`; 1 when the server accepts far less than this machine."""
    import json

    from tqdm import tqdm

    from drafter.bench.acceptance import add_all, measure_here, measure_server, warning_lines
    from drafter.bench.models import BenchModels
    from drafter.bench.workload import read_prompt_set
    from drafter.decoding.params import SamplingParams
    from drafter.distill.client import Client
    from drafter.distill.same_model import compare_models
    from drafter.utils.io import check_output, write_atomic
    from drafter.utils.provenance import run_record

    if options.out is not None:
        check_output(options.out, overwrite=True)
    client = None if options.url is None else Client(options.url, flag="--url")
    card = None if client is None else client.model_card(options.model)  # before the models are loaded
    spec = parse_method(options.method)
    workload = read_prompt_set(options.prompts).take(options.num_prompts) if options.traffic is None else None
    models = BenchModels.load(options, [spec], options.drafter)
    params = SamplingParams(max_new_tokens=options.max_new_tokens, temperature=options.temperature)
    served, differences, warning = None, [], []
    if workload is None:
        here, source = _along_traffic(options, models)
    else:
        source = {"prompts": {"name": workload.name, "digest": workload.digest}}
        with tqdm(total=len(workload.items) * (1 if client is None else 2), unit="answer", disable=None) as bar:
            here = measure_here(models, spec, workload, params, bar.update)
            if client is not None and card is not None:
                served = measure_server(client, card, workload, params, bar.update)
                chats = [list(item.messages) for item in workload.items if item.messages]
                differences = compare_models(client, card["id"], models.target, chats[:_NUM_COMPARED]).lines
                warning = warning_lines(add_all(here.values()), served, differences)
    _print_tables(here, served)
    if options.out is not None:
        content = {
            "schema": "drafter-evaluate/2",
            "target": {"name": models.target.name, "fingerprint": models.target.fingerprint},
            "drafter": models.drafter_name or None,
            "method": options.method,
            **source,
            **{name: getattr(options, name) for name in ("max_new_tokens", "temperature", "url")},
            "here": _as_json(here),
            "server": None if served is None else {**vars(served), "by_category": _as_json(served.by_category)},
            "differences": differences,
            **run_record(),
        }
        write_atomic(options.out, json.dumps(content, indent=2) + "\n")
    for line in warning or differences:
        print(line, file=sys.stderr)
    return 1 if warning else 0


def _along_traffic(options: EvaluateOptions, models: "BenchModels") -> tuple["ByCategory", dict[str, Any]]:
    """Counts along recorded answers, and their origin for the results file."""
    from tqdm import tqdm

    from drafter.bench.acceptance import Acceptance
    from drafter.bench.recorded import steps_along
    from drafter.data.traffic import read_traffic

    assert options.traffic is not None and models.drafter is not None
    target, counts = models.target, Acceptance()
    rows = read_traffic(options.traffic, vocab_size=target.vocab_size)
    fitting = [row for row in rows if len(row.prompt_token_ids) + len(row.token_ids) <= target.max_length]
    if len(fitting) < len(rows):
        print(f"{len(rows) - len(fitting)} answers exceed the target's context: left out", file=sys.stderr)
    if not fitting:
        raise ValueError(f"--traffic {options.traffic} holds no answer that fits the context of {target.name!r}")
    fitting = fitting[: options.num_prompts]
    plan = models.plan(parse_method(options.method), 1)
    with tqdm(total=len(fitting), unit="answer", disable=None) as bar:
        for steps in steps_along(target, models.drafter, plan, fitting, bar.update):
            counts.add(steps)
    num_tokens = sum(len(row.token_ids) for row in fitting)
    print(f"{num_tokens / counts.steps.total():.3f} tokens per step along {len(fitting)} recorded answers")
    return {"": counts}, {"traffic": str(options.traffic), "num_tokens": num_tokens}


def _as_json(counts: "ByCategory") -> dict[str, dict[str, object]]:
    return {name: each.as_json() for name, each in counts.items()}


def _print_tables(here: "ByCategory", served: "Served | None") -> None:
    """Shares by depth, and accepted tokens per step by category."""
    from drafter.bench.acceptance import add_all
    from drafter.utils.tables import format_table

    sources = {"here": here} | ({} if served is None else {"server": served.by_category})
    totals = {name: add_all(counts.values()) for name, counts in sources.items()}
    shares = [whole.shares for whole in totals.values()]
    depths = [
        [str(depth + 1), *(f"{each[depth]:.0%}" if depth < len(each) else "0%" for each in shares)]
        for depth in range(max(map(len, shares)))
    ]
    rows = []
    for name in [*here, "all"] if len(here) > 1 else here:
        found = [counts.get(name, totals[source] if name == "all" else None) for source, counts in sources.items()]
        first = found[0]
        assert first is not None
        rates = [f"{each.accepted_per_step:.2f}" if each is not None else "-" for each in found]
        rows.append([name or "all", str(first.num_answers), str(first.steps.total()), *rates])
    print("Share of the steps that accepted a drafted token at this depth:\n")
    print(format_table(["depth", *sources], depths))
    print("\nAccepted drafted tokens per step:\n")
    print(format_table(["category", "answers", "steps", *sources], rows))
