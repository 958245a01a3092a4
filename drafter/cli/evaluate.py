"""`drafter evaluate`: acceptance by depth and by category, here and as a running server reports it."""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from drafter.bench.methods import parse_method
from drafter.engine.loading import TargetConfig
from drafter.utils.options import Options
from drafter.utils.validate import within

if TYPE_CHECKING:
    from drafter.bench.acceptance import Acceptance, Served
    from drafter.bench.models import BenchModels
    from drafter.distill.client import Client

_NUM_COMPARED = 4  # prompts whose greedy answers are compared with the target


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(Options, TargetConfig):
    """Measure how many drafted tokens are accepted: by depth and category, here and on a server.

    With --traffic, the drafter is measured along recorded answers. With --url, the prompts go to the server too. If the
    server accepts far less than this machine, the command warns, names what differs (chat template, special tokens,
    dtype or quantisation, sampling, context length, speculation off) and returns exit code 1.

    Attributes:
        drafter: folder of an exported drafter, or name of a drafter that comes with the package
        method: how tokens are drafted, in the written form of `drafter bench`, such as drafter:W4:L3:N8 or lookup
        prompts: file of prompts, hub data set, or a name: evaluation, default, mtbench, humaneval, gsm8k
        traffic: file or folder of rows of token ids, such as that of `drafter serve --record`; drafts are counted along
            the recorded answers, and no prompt is answered
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
        if spec.name == "drafter" and self.drafter is None:
            raise ValueError(f"--method {self.method} needs a drafter: give --drafter DIR")
        if self.traffic is not None and (self.url is not None or spec.name != "drafter"):
            flag = f"--url {self.url}" if self.url is not None else f"--method {self.method}"
            raise ValueError(f"--traffic {self.traffic} counts a drafter along recorded answers: leave {flag} out")


def evaluate(options: EvaluateOptions) -> int:
    """Run `drafter evaluate`; 1 when the server accepts far less than this machine."""
    from drafter.bench.models import BenchModels
    from drafter.distill.client import Client
    from drafter.engine.loading import load_drafter
    from drafter.utils.io import check_output

    if options.out is not None:
        check_output(options.out, overwrite=True)
    client = card = None
    if options.url is not None:
        client = Client(options.url, flag="--url")
        card = client.model_card(options.model)  # a wrong address is known before the models are loaded
    target = options.load()
    is_drafter = parse_method(options.method).name == "drafter"
    drafter = load_drafter(options.drafter, target) if options.drafter is not None and is_drafter else None
    models = BenchModels(target, drafter, options.drafter or "", compile=options.compile)
    measured = _along_traffic(options, models) if options.traffic else _of_prompts(options, models, client, card)
    print("\n".join(_tables(measured.here, measured.served)))
    if options.out is not None:
        _write(options, models, measured)
    for line in measured.warning or measured.differences:
        print(line, file=sys.stderr)
    return 1 if measured.warning else 0


class _Measured(NamedTuple):
    """Counts here and of the server, the lines of a warning, the differences of the server, and what was asked."""

    here: "dict[str, Acceptance]"
    source: dict[str, Any]
    served: "Served | None" = None
    warning: Sequence[str] = ()
    differences: Sequence[str] = ()


def _along_traffic(options: EvaluateOptions, models: "BenchModels") -> _Measured:
    """Counts along recorded answers."""
    from tqdm import tqdm

    from drafter.bench.acceptance import Acceptance, add_all
    from drafter.bench.recorded import steps_along
    from drafter.data.traffic import read_traffic

    assert options.traffic is not None and models.drafter is not None
    rows = read_traffic(options.traffic, vocab_size=models.target.vocab_size)
    fitting = [row for row in rows if len(row.prompt_token_ids) + len(row.token_ids) <= models.target.max_length]
    if len(fitting) < len(rows):
        print(f"{len(rows) - len(fitting)} answers exceed the target's context: left out", file=sys.stderr)
    fitting = fitting[: options.num_prompts]
    if not fitting:
        raise ValueError(f"--traffic {options.traffic} holds no answer that fits the context of {models.target.name!r}")
    plan = models.plan(parse_method(options.method), 1)
    with tqdm(total=len(fitting), unit="answer", disable=None) as bar:
        steps = steps_along(models.target, models.drafter, plan, fitting, bar.update)
    counts = add_all(Acceptance.of_steps(each) for each in steps)
    num_tokens = sum(len(row.token_ids) for row in fitting)
    print(f"{num_tokens / counts.num_steps:.3f} tokens per step along {len(fitting)} recorded answers")
    return _Measured({"": counts}, {"traffic": str(options.traffic), "num_tokens": num_tokens})


def _of_prompts(
    options: EvaluateOptions, models: "BenchModels", client: "Client | None", card: dict[str, Any] | None
) -> _Measured:
    """Counts of answers to the prompts, here and on the server."""
    from tqdm import tqdm

    from drafter.bench.acceptance import add_all, measure_here, measure_server, warning_lines
    from drafter.bench.workload import read_prompt_set
    from drafter.decoding.params import SamplingParams
    from drafter.distill.same_model import compare_models

    workload = read_prompt_set(options.prompts).take(options.num_prompts)
    source = {"prompts": {"name": workload.name, "digest": workload.digest}}
    params = SamplingParams(max_new_tokens=options.max_new_tokens, temperature=options.temperature)
    with tqdm(total=len(workload.items) * (1 if client is None else 2), unit="answer", disable=None) as bar:
        here = measure_here(models, parse_method(options.method), workload, params, bar.update)
        if client is None or card is None:
            return _Measured(here, source)
        served = measure_server(client, card, workload, params, bar.update)
        chats = [list(item.messages) for item in workload.items if item.text is None]
        differences = compare_models(client, str(card["id"]), models.target, chats[:_NUM_COMPARED]).lines()
    return _Measured(here, source, served, warning_lines(add_all(here.values()), served, differences), differences)


def _tables(here: "dict[str, Acceptance]", served: "Served | None") -> list[str]:
    """Shares by depth, and accepted tokens per step by category."""
    from drafter.bench.acceptance import add_all
    from drafter.utils.tables import format_table

    whole = add_all(here.values())
    columns = ["here"] if served is None else ["here", "server"]
    sources = [whole.shares] if served is None else [whole.shares, served.whole.shares]
    depths = [
        [str(depth + 1), *(f"{shares[depth]:.0%}" if depth < len(shares) else "0%" for shares in sources)]
        for depth in range(max(map(len, sources)))
    ]
    parts = {} if served is None else {**served.by_category, "all": served.whole}
    rows = []
    for name, counts in (here if len(here) == 1 else {**here, "all": whole}).items():
        row = [name or "all", str(counts.num_answers), str(counts.num_steps), f"{counts.accepted_per_step:.2f}"]
        there = [f"{parts[name].accepted_per_step:.2f}" if name in parts else "-"] if served is not None else []
        rows.append(row + there)
    lines = [
        "Share of the steps that accepted a drafted token at this depth:",
        "",
        format_table(["depth", *columns], depths),
    ]
    lines += ["", "Accepted drafted tokens per step:", ""]
    return [*lines, format_table(["category", "answers", "steps", *columns], rows)]


def _write(options: EvaluateOptions, models: "BenchModels", measured: _Measured) -> None:
    import json

    from drafter.utils.io import write_atomic
    from drafter.utils.provenance import run_record

    assert options.out is not None
    content: dict[str, Any] = {
        "schema": "drafter-evaluate/2",
        "target": {"name": models.target.name, "fingerprint": models.target.fingerprint},
        "drafter": models.drafter_name or None,
        "method": options.method,
        **measured.source,
        **{name: getattr(options, name) for name in ("max_new_tokens", "temperature", "url")},
        "here": {name: asdict(counts) for name, counts in measured.here.items()},
        "server": None if measured.served is None else asdict(measured.served),
        "differences": list(measured.differences),
        **run_record(),
    }
    write_atomic(options.out, json.dumps(content, indent=2) + "\n")
