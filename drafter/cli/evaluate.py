"""`drafter evaluate`: acceptance by depth and by category, here and as a running server reports it."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drafter.bench.settings import MethodOptions, MethodSpec, parse_method
from drafter.utils.validate import within

if TYPE_CHECKING:
    from drafter.bench.acceptance import ByCategory
    from drafter.engine.engine import Engine

_NUM_COMPARED = 4  # prompts whose greedy answers are compared with the target


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(MethodOptions):
    """Measure how many drafted tokens are accepted: by depth and category, here and on a server.

    With --traffic, drafts are counted along recorded answers. With --url, the prompts go to the server too. If the
    server accepts far less than this machine, the command warns, names what differs (chat template, dtype or
    quantisation, sampling, context length, speculation off) and returns exit code 1.

    Attributes:
        method: how tokens are drafted, in the written form of `drafter bench`, such as drafter:W4:L3:N8 or lookup
        prompts: file of prompts, hub data set, folder of `drafter serve --record`, or a name: evaluation, default,
            mtbench, humaneval, gsm8k
        traffic: file or folder of rows of token ids, such as that of `drafter serve --record`; drafts are counted along
            the recorded answers, and no prompt is answered
        temperature: 0 is greedy
        url: address of a running server with OpenAI's protocol (ours or vLLM) that is measured too
        model: name of the model on the server (default: the first model that the server lists)
        out: results file (.json)
    """

    method: str = "drafter"
    prompts: str = "evaluation"
    traffic: Path | None = None
    temperature: float = within(0.0, low=0.0)
    url: str | None = None
    model: str | None = None
    out: Path | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        (spec,) = self.specs
        if spec.is_peer or spec.name == "draft-model":
            raise ValueError(f"--method {self.method}: evaluate measures none, drafter or lookup")
        if self.traffic is not None and (self.url is not None or spec.name != "drafter"):
            flag = f"--url {self.url}" if self.url is not None else f"--method {self.method}"
            raise ValueError(f"--traffic {self.traffic} counts a drafter along recorded answers: leave {flag} out")

    @property
    def specs(self) -> tuple[MethodSpec, ...]:
        """The one method."""
        return (parse_method(self.method),)


def evaluate(options: EvaluateOptions) -> int:
    """Run `drafter evaluate`; 1 when the server accepts far less than this machine."""
    import json

    from tqdm import tqdm

    from drafter.bench.acceptance import measure_here, measure_server, warning_lines, whole_of
    from drafter.bench.workload import read_prompt_set
    from drafter.decoding.params import SamplingParams
    from drafter.distill.same_model import compare_models
    from drafter.engine.engine import Engine
    from drafter.utils.client import Client
    from drafter.utils.io import check_output, write_atomic
    from drafter.utils.provenance import run_record

    if options.out is not None:
        check_output(options.out, overwrite=True)
    client = None if options.url is None else Client(options.url, flag="--url")
    card = None if client is None else client.model_card(options.model)  # before the models are loaded
    workload = read_prompt_set(options.prompts).take(options.num_prompts) if options.traffic is None else None
    models = options.load_models()
    plan = options.specs[0].plan(models, 1, options.compile if options.traffic is None else False)
    engine = Engine(models.target, models.drafter, plan)
    params = SamplingParams(max_new_tokens=options.max_new_tokens, temperature=options.temperature)
    served, differences, warning = None, [], []
    if workload is None:
        here, source = _along_traffic(options, engine)
    else:
        source = {"prompts": {"name": workload.name, "digest": workload.digest}}
        with tqdm(total=len(workload.items) * (1 if client is None else 2), unit="answer", disable=None) as bar:
            here = measure_here(engine, workload, params, bar.update)
            if client is not None and card is not None:
                served = measure_server(client, card, workload, params, bar.update)
                chats = [list(item.messages) for item in workload.items if item.messages]
                differences = compare_models(client, card["id"], models.target, chats[:_NUM_COMPARED]).lines
                warning = warning_lines(whole_of(here), served, differences)
    counts = {"here": here} | ({} if served is None else {"server": served.by_category})
    _print_tables(counts)
    if options.out is not None:
        figures = {name: {key: each.as_json() for key, each in by.items()} for name, by in counts.items()}
        content = {
            "schema": "drafter-evaluate/2",
            "target": {"name": models.target.name, "fingerprint": models.target.fingerprint},
            "drafter": options.drafter_used,
            "method": options.method,
            **source,
            **{name: getattr(options, name) for name in ("max_new_tokens", "temperature", "url")},
            "here": figures["here"],
            "server": None if served is None else {**served._asdict(), "by_category": figures["server"]},
            "differences": differences,
            **run_record(),
        }
        write_atomic(options.out, json.dumps(content, indent=2) + "\n")
    for line in warning or differences:
        print(line, file=sys.stderr)
    return 1 if warning else 0


def _along_traffic(options: EvaluateOptions, engine: "Engine") -> tuple["ByCategory", dict[str, Any]]:
    """Counts along recorded answers, and their origin for the results file."""
    from tqdm import tqdm

    from drafter.bench.acceptance import Acceptance, steps_along
    from drafter.data.traffic import read_traffic

    assert options.traffic is not None
    target, counts = engine.target, Acceptance()
    rows = read_traffic(options.traffic, vocab_size=target.vocab_size)
    fitting = [row for row in rows if len(row.prompt_token_ids) + len(row.token_ids) <= target.max_length]
    if len(fitting) < len(rows):
        print(f"{len(rows) - len(fitting)} answers exceed the target's context: left out", file=sys.stderr)
    if not fitting:
        raise ValueError(f"--traffic {options.traffic} holds no answer that fits the context of {target.name!r}")
    fitting = fitting[: options.num_prompts]
    with tqdm(total=len(fitting), unit="answer", disable=None) as bar:
        for steps in steps_along(engine, fitting, bar.update):
            counts.add(steps)
    num_tokens = sum(len(row.token_ids) for row in fitting)
    print(f"{num_tokens / counts.steps.total():.3f} tokens per step along {len(fitting)} recorded answers")
    return {"": counts}, {"traffic": str(options.traffic), "num_tokens": num_tokens}


def _print_tables(counts: dict[str, "ByCategory"]) -> None:
    """Shares by depth, and accepted tokens per step by category, one column each for ``here`` and ``server``."""
    from drafter.bench.acceptance import whole_of
    from drafter.utils.tables import format_table

    totals = [whole_of(by_category) for by_category in counts.values()]
    depths = range(max(len(whole.reached) for whole in totals))
    shares = [[sum((whole.reached[depth:])[:1]) / max(1, whole.steps.total()) for whole in totals] for depth in depths]
    print("Share of the steps that accepted a drafted token at this depth:\n")
    print(format_table(["depth", *counts], [[str(n), *(f"{s:.0%}" for s in row)] for n, row in enumerate(shares, 1)]))
    rows = []
    for name, own in counts["here"].items():
        found = [by_category.get(name) for by_category in counts.values()]
        rates = ["-" if each is None else f"{each.accepted_per_step:.2f}" for each in found]
        rows.append([name or "all", str(own.num_answers), str(own.steps.total()), *rates])
    if len(rows) > 1:
        rates = [f"{whole.accepted_per_step:.2f}" for whole in totals]
        rows.append(["all", str(totals[0].num_answers), str(totals[0].steps.total()), *rates])
    print("\nAccepted drafted tokens per step:\n")
    print(format_table(["category", "answers", "steps", *counts], rows))
