"""`drafter evaluate`: acceptance by depth and by category."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drafter.bench.settings import MethodOptions, MethodSpec, parse_method
from drafter.utils.validate import within

if TYPE_CHECKING:
    from drafter.bench.acceptance import Acceptance
    from drafter.engine.engine import Engine


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(MethodOptions):
    """Measure how many drafted tokens are accepted, by depth and by category.

    With --traffic, drafts are counted along recorded answers, such as those of a server.

    Attributes:
        method: how tokens are drafted, in the written form of `drafter bench`, such as drafter:W4:L3:N8 or lookup
        prompts: file of prompts, hub data set, folder of `drafter serve --record`, or a name: evaluation, default,
            mtbench, humaneval, gsm8k
        traffic: file or folder of rows of token ids, such as that of `drafter serve --record`; drafts are counted along
            the recorded answers, and no prompt is answered
        temperature: 0 is greedy
        out: results file (.json)
    """

    method: str = "drafter"
    prompts: str = "evaluation"
    traffic: Path | None = None
    temperature: float = within(0.0, low=0.0)
    out: Path | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        (spec,) = self.specs
        if spec.is_peer or spec.name == "draft-model":
            raise ValueError(f"--method {self.method}: evaluate measures none, drafter or lookup")
        if self.traffic is not None and spec.name != "drafter":
            raise ValueError(
                f"--traffic {self.traffic} counts a drafter along recorded answers: leave --method {self.method} out"
            )

    @property
    def specs(self) -> tuple[MethodSpec, ...]:
        """The one method."""
        return (parse_method(self.method),)


def evaluate(options: EvaluateOptions) -> None:
    """Run `drafter evaluate`."""
    import json

    from tqdm import tqdm

    from drafter.bench.acceptance import measure_prompts
    from drafter.bench.workload import read_prompt_set
    from drafter.decoding.params import SamplingParams
    from drafter.engine.engine import Engine
    from drafter.utils.io import check_output, write_atomic
    from drafter.utils.provenance import run_record

    if options.out is not None:
        check_output(options.out, overwrite=True)
    workload = read_prompt_set(options.prompts).take(options.num_prompts) if options.traffic is None else None
    models = options.load_models()
    plan = replace(options.specs[0].plan(models, 1, options.compile), enable_prefix_caching=workload is None)
    engine = Engine(models.target, models.drafter, plan)
    if workload is None:
        counts, source = _along_traffic(options, engine)
    else:
        source = {"prompts": {"name": workload.name, "digest": workload.digest}}
        params = SamplingParams(max_new_tokens=options.max_new_tokens, temperature=options.temperature)
        with tqdm(total=len(workload.items), unit="answer", disable=None) as bar:
            counts = measure_prompts(engine, workload, params, bar.update)
    _print_tables(counts)
    if options.out is not None:
        content = {
            "schema": "drafter-evaluate/3",
            "target": {"name": models.target.name, "fingerprint": models.target.fingerprint},
            "drafter": options.drafter_used,
            "method": options.method,
            **source,
            **{name: getattr(options, name) for name in ("max_new_tokens", "temperature")},
            "acceptance": {name: each.as_json() for name, each in counts.items()},
            **run_record(),
        }
        write_atomic(options.out, json.dumps(content, indent=2) + "\n")


def _along_traffic(options: EvaluateOptions, engine: "Engine") -> tuple["dict[str, Acceptance]", dict[str, Any]]:
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


def _print_tables(counts: "dict[str, Acceptance]") -> None:
    """Shares by depth, and accepted tokens per step by category."""
    from drafter.bench.acceptance import Acceptance
    from drafter.utils.tables import format_table

    whole = sum(counts.values(), Acceptance())
    shares = [f"{num / max(1, whole.steps.total()):.0%}" for num in whole.reached]
    print("Share of the steps that accepted a drafted token at this depth:\n")
    print(format_table(["depth", "accepted"], [[str(depth), share] for depth, share in enumerate(shares, 1)]))
    rows = [
        [name or "all", str(own.num_answers), str(own.steps.total()), f"{own.accepted_per_step:.2f}"]
        for name, own in (counts if len(counts) == 1 else counts | {"": whole}).items()
    ]
    print("\nAccepted drafted tokens per step:\n")
    print(format_table(["category", "answers", "steps", "accepted"], rows))
